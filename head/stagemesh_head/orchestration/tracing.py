"""Spans of one request, made from what its state machine hears and orders: one for the request, and for each attempt of
a task one for the wait for a replica and one for its time there.

It only looks on: the state machine knows nothing of it, and an error in here costs spans and no request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from stagemesh.rpc.errors import MeshError
from stagemesh.telemetry.context import TraceContext
from stagemesh.telemetry.tracing import Span, Tracer
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_head.orchestration import events as ev
from stagemesh_head.orchestration.task import Task

log = logging.getLogger(__name__)

SHOWN_WAIT_S = 0.001
"""A shorter wait for admission is not worth a span."""


class RequestTrace:
    """The spans of one request on its way through a head."""

    def __init__(self, tracer: Tracer, parent: TraceContext, request: inference_pb.GenerateRequest) -> None:
        self._tracer = tracer
        self._arrived_at = monotonic()
        self._request = request
        self.pipeline = request.pipeline
        """Its name, once it is known."""
        self._root = tracer.start("request", parent, kind="server")
        self._picks: dict[str, Span] = {}
        self._tasks: dict[str, Span] = {}
        self._attempts: dict[str, int] = {}
        self._replicas: dict[str, replica_pb.ReplicaRef] = {}
        self._spoke: set[str] = set()

    @property
    def is_recording(self) -> bool:
        """Whether the request was sampled."""
        return self._root.is_recording

    @property
    def context(self) -> TraceContext:
        """The request's own span."""
        return self._root.context

    def refused(self, error: MeshError) -> None:
        """The request was not taken."""
        self._end_root(error)

    def saw(self, event: ev.Event, commands: Sequence[ev.Command], tasks: Mapping[str, Task]) -> None:
        """The state machine took an event and ordered what follows. A `Submit` gets its trace context here.

        Args:
            tasks: the request's, by name.
        """
        try:
            self._hear(event)
            for command in commands:
                self._note(command, tasks)
        except Exception:
            log.exception("a request's trace is not complete")

    def collapsed(self, error: MeshError) -> None:
        """The request ended without its state machine."""
        for span in [*self._picks.values(), *self._tasks.values()]:
            span.end(error)
        self._end_root(error)

    def _hear(self, event: ev.Event) -> None:
        match event:
            case ev.OutputArrived():
                if event.task not in self._spoke:
                    self._spoke.add(event.task)
                    self._tell(event.task, "first output")
            case ev.Start():
                if monotonic() - self._arrived_at > SHOWN_WAIT_S:
                    self._tracer.start("admission", self._root, at=self._arrived_at).end()
            case ev.Bound():
                self._replicas[event.task] = event.replica
                if (pick := self._picks.pop(event.task, None)) is not None:
                    pick.set(replica=event.replica.replica_id)
                    pick.end()
            case ev.BindFailed():
                if (pick := self._picks.pop(event.task, None)) is not None:
                    pick.end(event.error)
            case ev.Started():
                self._tell(event.task, "engine began", engine_queue_s=event.engine_queue_s)
            case ev.Finished() | ev.Failed() | ev.Lost() | ev.Aborted():
                self._task_over(event)

    def _task_over(self, event: ev.Finished | ev.Failed | ev.Lost | ev.Aborted) -> None:
        span = self._tasks.pop(event.task, None)
        if span is None:
            return
        if isinstance(event, ev.Finished):
            usage = event.finished.usage
            span.set(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
            span.end()
        elif isinstance(event, ev.Aborted):
            span.set(aborted=True)
            span.end()
        else:
            span.end(event.error)

    def _note(self, command: ev.Command, tasks: Mapping[str, Task]) -> None:
        match command:
            case ev.Bind():
                attempt = self._attempts[command.task] = self._attempts.get(command.task, 0) + 1
                self._picks[command.task] = self._start("pick", tasks[command.task], attempt=attempt)
            case ev.CancelBind():
                self._picks.pop(command.task).end()
            case ev.Submit():
                submit, replica = command.command, self._replicas[command.task]
                span = self._tasks[command.task] = self._start(
                    "task", tasks[command.task], kind="client", attempt=submit.attempt, replica=replica.replica_id,
                    incarnation=replica.incarnation, resumed_tokens=len(submit.resume_token_ids),
                )  # fmt: skip
                self._spoke.discard(command.task)
                context = span.context
                submit.traceparent, submit.tracestate = context.traceparent, context.tracestate
            case ev.AbortTask():
                self._tell(command.task, "abort", reason=command.reason)
            case ev.End():
                self._end(command)

    def _start(self, what: str, task: Task, *, kind: str = "internal", **attributes: Any) -> Span:
        """Begin a span of one task. Companions are told apart by an attribute: names of spans are few."""
        companion = task.companion.suffix if task.companion else None
        return self._tracer.start(
            f"{what} {task.stage_name}", self._root, kind=kind, stage=task.stage_name, companion=companion, **attributes
        )

    def _tell(self, task: str, what: str, **attributes: str | float) -> None:
        if (span := self._tasks.get(task)) is not None:
            span.event(what, **attributes)

    def _end(self, command: ev.End) -> None:
        if command.finished is not None:
            reason = frame_pb.FinishReason.Name(command.finished.finish_reason).removeprefix("FINISH_REASON_")
            self._root.set(outcome=reason.lower(), completion_tokens=command.finished.usage.completion_tokens)
        elif command.error is None:
            self._root.set(outcome="left")
        self._end_root(command.error)

    def _end_root(self, error: MeshError | None) -> None:
        # Only now: an id that the client left out is made after the request's arrival.
        if self._root.is_recording:
            self._root.set(request_id=self._request.request_id, pipeline=self.pipeline or None)
            self._root.end(error)

"""Spans of one task inside its replica: bringing its inputs, and the engine's work with its parts."""

from __future__ import annotations

from time import monotonic

from stagemesh.rpc.errors import MeshError
from stagemesh.telemetry.context import TraceContext
from stagemesh.telemetry.tracing import Span, Tracer
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_worker.replica.sink import SlotSink

LONG_ENOUGH_S = 0.0005
"""A shorter wait for the engine is not worth a span."""


class TaskTrace:
    """The spans of one attempt of one task."""

    def __init__(self, tracer: Tracer, submit: stage_pb.SubmitTask, stage: str, *, is_llm: bool) -> None:
        self._tracer = tracer
        self._submit = submit
        self._is_llm = is_llm
        parent = TraceContext(submit.traceparent, submit.tracestate)
        self._root = tracer.start(
            f"stage {stage}", parent, kind="server", stage=stage, request_id=submit.request_id, attempt=submit.attempt,
            companion_role=submit.companion_role or None,
        )  # fmt: skip
        self._engine: Span | None = None
        self._engine_began_at = 0.0

    def brought(self, source: str, size_bytes: int, began_at: float) -> None:
        """An output of the stage `source` came with the task and is here now."""
        self._tracer.start("transfer", self._root, at=began_at, source=source, bytes=size_bytes).end()

    def engine_begins(self) -> None:
        """The engine gets the task; what it traces by itself belongs to the span that begins here."""
        self._engine_began_at = monotonic()
        self._engine = self._tracer.start("engine", self._root, at=self._engine_began_at)
        context = self._engine.context
        self._submit.traceparent, self._submit.tracestate = context.traceparent, context.tracestate

    def end(self, sink: SlotSink, error: MeshError | None, *, aborted: bool = False) -> None:
        """The task is over."""
        now = sink.ended_at or monotonic()
        if self._engine is not None:
            self._parts_of_engine(sink, now)
            self._engine.set(completion_tokens=sink.completion_tokens or None)
            self._engine.end(error, at=now)
        if aborted:
            self._root.set(aborted=True)
        self._root.end(error, at=now)

    def _parts_of_engine(self, sink: SlotSink, now: float) -> None:
        """Queue, prefill and decode, or queue and the rest where output comes as a whole."""
        computing_from = min(self._engine_began_at + sink.engine_queue_s, now)
        if sink.engine_queue_s > LONG_ENOUGH_S:
            self._past("queue", self._engine_began_at, computing_from)
        first = sink.first_output_at
        if not self._is_llm:
            self._past("generate", computing_from, now)
        elif first:
            first = max(first, computing_from)
            self._past("prefill", computing_from, first)
            self._past("decode", first, now)

    def _past(self, name: str, since: float, until: float) -> None:
        self._tracer.start(name, self._engine, at=since).end(at=until)

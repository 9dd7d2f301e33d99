"""Runs one request: carries out what its state machine orders, and brings it what happens."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.wire import duration
from stagemesh_head.links.release import TensorReleaser
from stagemesh_head.orchestration import events as ev
from stagemesh_head.orchestration.companions import name_companion
from stagemesh_head.orchestration.dispatch import prompt_append
from stagemesh_head.orchestration.expansion import Expander
from stagemesh_head.orchestration.final import frames_of
from stagemesh_head.orchestration.hint import hint_of
from stagemesh_head.orchestration.machine import RequestMachine
from stagemesh_head.orchestration.pacer import Pacer
from stagemesh_head.orchestration.plan import Plan
from stagemesh_head.orchestration.receiver import TaskReceiver
from stagemesh_head.orchestration.recovery import RecoveryLimits
from stagemesh_head.orchestration.stream import ClientStream, TextCursor
from stagemesh_head.orchestration.tracing import RequestTrace
from stagemesh_head.routing.pool import Binding, StagePool, Ticket
from stagemesh_head.routing.pools import Pools

log = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 2.0
FETCH_GRACE_S = 60.0
"""Time that a client has to fetch outputs that it got by reference, from the end of its request."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all requests of a head share."""

    pools: Pools
    pacer: Pacer
    recovery: RecoveryLimits
    releaser: TensorReleaser
    expanders: Mapping[str, Expander]
    """What makes companions, by pipeline."""


class RequestRun:
    """One request from its admission to its end. Everything happens on the event loop, in callbacks."""

    def __init__(
        self,
        plan: Plan,
        around: Surroundings,
        *,
        deadline: float | None,
        ended: Callable[[RequestRun], None],
        quiet: Callable[[RequestRun], None],
        trace: RequestTrace | None = None,
    ) -> None:
        """Args:
            deadline: on the monotonic clock.
            ended: called once, when the client's stream has its end.
            quiet: called once, at the same time or later, when no replica can be at work for it any more.
        """
        self.plan = plan
        self.started_at = monotonic()
        self.machine = RequestMachine(plan, self.started_at, deadline=deadline, limits=around.recovery)
        self.stream = ClientStream(plan.request_id, around.pacer, sequence=plan.request.resume.sequence)
        self._around = around
        self._ended = ended
        self._quiet = quiet
        self._trace = trace
        self._hint = hint_of(plan)
        self._cursors = {
            name: TextCursor(name, task.output) for name, task in self.machine.tasks.items() if task.planned.is_output
        }
        self._bindings: dict[str, Binding] = {}
        self._tickets: dict[str, Ticket] = {}
        self._receivers: dict[str, TaskReceiver] = {}
        self._progress: dict[str, tuple[int, float]] = {}
        """Task -> its signs of life when they last grew, and when that was."""
        self._events: deque[ev.Event] = deque()
        self._is_applying = False
        self._is_admitted = False
        self._is_settled = False
        self._prompt_bytes = plan.request.prompt.ByteSize() if plan.is_interactive else 0
        self._quiet_waiters: list[asyncio.Future[None]] = []
        self._expansion: asyncio.Task[None] | None = None
        self._companions_timer: asyncio.TimerHandle | None = None
        self._stop_timer: asyncio.TimerHandle | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._deadline_timer = loop.call_later(max(deadline - self.started_at, 0.0), self._out_of_time)

    # -- from outside -----------------------------------------------------------
    def start(self) -> None:
        """The request was admitted."""
        self._is_admitted = True
        self._tell(ev.Start())

    def stop(self, cause: ev.StopCause, error: MeshError | None = None, *, timeout: float = ABORT_TIMEOUT_S) -> None:
        """End it. Asked to, it waits `timeout` seconds for the stages' word; otherwise it ends at once."""
        if cause is ev.StopCause.ASKED and self._stop_timer is None and not self.machine.is_ended:
            self._stop_timer = asyncio.get_running_loop().call_later(timeout, self._tell, ev.StopTimeout())
        self._tell(ev.Stop(cause, error))

    def append(
        self, prompt: prompt_pb.Prompt | None, params: sampling_pb.SamplingParams | None, *, is_last: bool
    ) -> None:
        """Further input of an interactive request; a request that is over takes none.

        Raises:
            MeshError: PROMPT_TOO_LARGE, all chunks together.
        """
        if prompt is not None:
            first = self.plan.stages[0].stage
            self._prompt_bytes += prompt.ByteSize()
            limit = first.limits.max_prompt_bytes
            if self._prompt_bytes > limit:
                raise MeshError(
                    Reason.PROMPT_TOO_LARGE,
                    f"append: {self._prompt_bytes} bytes in all: stage {first.name!r} takes at most {limit} bytes",
                    field="append",
                    limit_bytes=limit,
                )
        self._tell(ev.PromptArrived(prompt_append(prompt, params, is_last=is_last)))

    def discard(self) -> None:
        """It was not admitted: forget it. Nothing was started."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()

    async def quiet(self) -> None:
        """Wait until no replica is at work for it. The caller bounds the time."""
        if not self.machine.is_quiet:
            waiter = asyncio.get_running_loop().create_future()
            self._quiet_waiters.append(waiter)
            await waiter

    def check_progress(self, now: float, timeout_s: float) -> None:
        """Fail the request when a task gave no sign of life for `timeout_s` seconds."""
        for name, receiver in list(self._receivers.items()):
            signs = receiver.signs
            before, since = self._progress.get(name, (-1, now))
            if signs != before:
                self._progress[name] = (signs, now)
            elif now - since >= timeout_s:
                task, replica = receiver.task, receiver.link.key
                message = f"stage {task.stage_name!r} made no progress for {timeout_s:g} s on replica {replica}"
                error = MeshError(Reason.ENGINE_STUCK, message, stage=task.stage_name, replica=replica)
                self.stop(ev.StopCause.FAILED, name_companion(self.plan, task, error))

    def describe(self) -> admin_pb.RequestInfo:
        """Where it stands, for people."""
        info = admin_pb.RequestInfo(
            request_id=self.plan.request_id,
            pipeline=self.plan.pipeline.name,
            age=duration(monotonic() - self.started_at),
        )
        for task in self.machine.tasks.values():
            row = info.tasks.add(stage=task.stage_name, state=task.state.value, attempt=task.attempt)
            row.companion = task.companion.suffix if task.companion else ""
            if task.is_bound and task.replicas:
                row.replica.CopyFrom(task.replicas[-1])
        return info

    # -- events in, commands out --------------------------------------------------
    def _tell(self, event: ev.Event) -> None:
        """Have the machine take an event. What follows from it is done before this returns, in order."""
        self._events.append(event)
        if self._is_applying:
            return
        self._is_applying = True
        try:
            while self._events:
                event = self._events.popleft()
                commands = self.machine.handle(event, monotonic())
                if self._trace is not None:
                    self._trace.saw(event, commands, self.machine.tasks)
                for command in commands:
                    self._carry_out(command)
        except Exception as error:
            name = self.plan.request_id
            log.exception("request %s: error inside the head", name, extra={"request_id": name})
            self._collapse(MeshError.from_exception(error))
        finally:
            self._is_applying = False
        if self.machine.is_quiet:
            self._became_quiet()

    def _carry_out(self, command: ev.Command) -> None:
        match command:
            case ev.Bind():
                self._bind(command)
            case ev.Submit():
                self._submit(command)
            case ev.Release():
                self._receivers.pop(command.task, None)
                self._bindings.pop(command.task).release()
            case ev.DeliverFinished():
                self._deliver_finished(command.task)
            case ev.End():
                self._end(command)
            case ev.Feed():
                receiver = self._receivers[command.task]
                append = stage_pb.AppendInput()
                append.CopyFrom(command.append)
                append.slot = receiver.slot
                receiver.link.append(append)
            case ev.Grant():
                receiver = self._receivers[command.task]
                receiver.link.grant(receiver.slot, command.units)
            case ev.ReleaseTensors():
                self._around.releaser.release(command.references, 0.0)
            case ev.AbortTask():
                receiver = self._receivers[command.task]
                receiver.link.abort(receiver.slot, command.reason)
            case ev.Expand():
                self._expansion = asyncio.create_task(self._expand(), name=f"companions of {self.plan.request_id}")
            case ev.AwaitCompanions():
                loop = asyncio.get_running_loop()
                self._companions_timer = loop.call_later(command.seconds, self._tell, ev.CompanionsLate())
            case ev.CancelBind():
                ticket = self._tickets.pop(command.task)
                self._pool(command.task).leave(ticket)

    def _pool(self, task: str) -> StagePool:
        return self._around.pools.of(self.plan.pipeline.name, self.machine.tasks[task].stage_name)

    async def _expand(self) -> None:
        """Make the companions; ends with the request at the latest."""
        expander = self._around.expanders[self.plan.pipeline.name]
        try:
            made = await expander.expand(self.plan.request.prompt, self.plan.stages[0].params)
        except MeshError as error:
            self._tell(ev.ExpandFailed(error))
        else:
            self._tell(ev.Expanded(made))

    def _bind(self, command: ev.Bind) -> None:
        pool, name = self._pool(command.task), command.task
        binding = pool.pick(self._hint, command.excluded, command.beside)
        if binding is not None:
            self._bound(name, binding)
            return
        if command.or_else is not None:
            self._tell(ev.BindFailed(name, command.or_else))
            return

        def granted(binding: Binding) -> None:
            del self._tickets[name]
            self._bound(name, binding)

        try:
            self._tickets[name] = pool.wait(self._hint, command.excluded, granted)
        except MeshError as error:
            self._tell(ev.BindFailed(name, error))

    def _bound(self, task: str, binding: Binding) -> None:
        self._bindings[task] = binding
        self._tell(ev.Bound(task, binding.row.key.ref(binding.row.incarnation), binding.identity))

    def _submit(self, command: ev.Submit) -> None:
        task = self.machine.tasks[command.task]
        link = self._bindings[command.task].link
        cursor = self._cursors.get(command.task)
        is_direct = cursor is not None and self.plan.is_delta
        if cursor is not None and is_direct:
            if task.output.is_empty or task.attempt == 1:
                # Nothing, or what the client had before this head knew of it.
                self.stream.drop_text(cursor)
                cursor.skip_to_end()
            else:
                self.stream.close_text(cursor)
            cursor.replica_id = link.key.replica_id
        receiver = TaskReceiver(
            task,
            link,
            self._tell,
            stream=self.stream if is_direct else None,
            cursor=cursor if is_direct else None,
            feeds_stream=self.machine.feeds_stream(command.task),
        )
        self._receivers[command.task] = receiver
        try:
            receiver.slot = link.submit(receiver, command.command)
        except MeshError as error:
            self._tell(ev.Lost(command.task, error))

    def _became_quiet(self) -> None:
        """It ended and no replica is at work for it."""
        self._wake_quiet_waiters()
        if self._is_settled:
            return
        self._is_settled = True
        for task in self.machine.tasks.values():
            if references := task.output.references():
                self._around.releaser.release(references, FETCH_GRACE_S if task.planned.is_output else 0.0)
        self._quiet(self)

    # -- towards the client -------------------------------------------------------
    def _deliver_finished(self, name: str) -> None:
        task = self.machine.tasks[name]
        assert task.finished is not None
        if self.plan.is_delta:
            self.stream.close_text(self._cursors[name])
        else:
            for frame in frames_of(task):
                self.stream.add(frame)
        replica_id = task.replicas[-1].replica_id if task.replicas else 0
        self.stream.add(frame_pb.Frame(stage=name, replica_id=replica_id, stage_finished=task.finished))

    def _end(self, command: ev.End) -> None:
        for pending in (self._deadline_timer, self._stop_timer, self._companions_timer, self._expansion):
            if pending is not None:
                pending.cancel()
        self.stream.end(command.finished, command.error)
        self._ended(self)

    def _out_of_time(self) -> None:
        """The deadline has come."""
        waiting = [task.name for task in self.machine.tasks.values() if task.is_binding]
        if not self._is_admitted:
            error = MeshError(
                Reason.OVERLOADED,
                f"pipeline {self.plan.pipeline.name!r}: the request waited for its turn until its deadline",
                pipeline=self.plan.pipeline.name,
            )
        elif waiting:
            error = self._pool(waiting[0]).missing()
        else:
            is_expanding = self._expansion is not None and not self._expansion.done()
            running = ", ".join(self.machine.unconfirmed) or ("none, but prompt_expand" if is_expanding else "none")
            error = MeshError(
                Reason.REQUEST_TIMEOUT,
                f"request {self.plan.request_id} ran out of time; stages at work: {running}",
                stages=running,
            )
        self.stop(ev.StopCause.FAILED, error)

    # -- the worst case ---------------------------------------------------------
    def _collapse(self, error: MeshError) -> None:
        """An error of ours: end the request without its machine, and leave nothing behind."""
        self._events.clear()
        if self._trace is not None:
            self._trace.collapsed(error)
        for name, ticket in self._tickets.items():
            self._pool(name).leave(ticket)
        for receiver in self._receivers.values():
            receiver.detach()
            if receiver.slot:
                receiver.link.abort(receiver.slot, "error inside the head")
        for binding in self._bindings.values():
            binding.release()
        self._tickets.clear()
        self._receivers.clear()
        self._bindings.clear()
        self.machine.collapse()
        if not self.stream.is_ended:
            self._end(ev.End(error=error))
        self._wake_quiet_waiters()

    def _wake_quiet_waiters(self) -> None:
        for waiter in self._quiet_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._quiet_waiters.clear()

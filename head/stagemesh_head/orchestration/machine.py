"""The state machine of one request: events in, commands out, no I/O.

Every task goes WAITING -> SUBMITTED -> STREAMING -> DONE | FAILED | ABORTED, and back to WAITING when its replica is
lost and it may go on elsewhere. The request ends exactly once; a task whose end was not confirmed by then is still
followed, so that its place on its replica is released exactly once too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_head.orchestration import events as ev
from stagemesh_head.orchestration.companions import Companions
from stagemesh_head.orchestration.dispatch import submission
from stagemesh_head.orchestration.edges import StreamEdges, whole_output
from stagemesh_head.orchestration.ending import Ending
from stagemesh_head.orchestration.losses import Fails, Losses
from stagemesh_head.orchestration.pair import read_by
from stagemesh_head.orchestration.plan import Plan
from stagemesh_head.orchestration.recovery import RETRY_ELSEWHERE, RecoveryLimits, ResumeMode
from stagemesh_head.orchestration.summary import complete, cut_short
from stagemesh_head.orchestration.takeover import take_up
from stagemesh_head.orchestration.task import Task, TaskState


class RequestMachine(Ending):
    """One request. `handle` is the only way in; it returns the commands to carry out, in order."""

    def __init__(
        self, plan: Plan, now: float, *, deadline: float | None = None, limits: RecoveryLimits | None = None
    ) -> None:
        """Args: deadline: on the same clock as `now`; None is none."""
        super().__init__(plan, now)
        self._deadline = deadline
        self._edges = StreamEdges(self.tasks)
        self._companions = Companions(plan, self.tasks)
        self._losses = Losses(plan, self._edges, limits or RecoveryLimits())
        self._prompts: list[stage_pb.AppendInput] = []
        """Further chunks of an interactive request, kept for another attempt."""

    # -- what others may ask --------------------------------------------------
    def feeds_stream(self, task: str) -> bool:
        """Whether a later stage reads the task's output as it grows."""
        return task in self._edges.out_of

    # -- events -----------------------------------------------------------------
    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        """Take one event. Events of tasks that are over, or that come too late, change nothing."""
        self._now, self._out = now, []
        _STEPS[type(event)](self, event)
        return self._out

    # -- starting -------------------------------------------------------------
    def _start(self, event: ev.Start) -> None:
        verdict = take_up(self.plan.request.resume, self.tasks, self._losses, self._now)
        if verdict is not None:
            self._fail(verdict.task, verdict.error)
        elif self._all_outputs_done:
            self._end(finished=frame_pb.FINISH_REASON_COMPLETE)
        if self._companions.are_wanted and not self._is_stopping:
            # All or nothing: no task begins before the companions are known.
            self._out.append(ev.Expand())
        else:
            self._advance_all()

    def _advance_all(self) -> None:
        for task in list(self.tasks.values()):
            self._advance(task)

    def _expanded(self, event: ev.Expanded) -> None:
        if not self._is_stopping:
            self._companions.add(event.companions)
            self._advance_all()

    def _expand_failed(self, event: ev.ExpandFailed) -> None:
        if not self._is_stopping:
            self._fail(self.tasks[self.plan.stages[0].name], event.error)

    def _companions_late(self, event: ev.CompanionsLate) -> None:
        error = self._companions.too_late()
        if error is not None and not self._is_stopping:
            self._end(error=error)  # which stops the companion like all others

    def _advance(self, task: Task, or_else: MeshError | None = None) -> None:
        """Ask for a replica when the task's inputs allow it."""
        if task.state is not TaskState.WAITING or task.is_binding or task.is_bound or self._is_stopping:
            return
        inputs = [self.tasks[name] for name in task.planned.inputs]
        if task.planned.reads_stream:
            # Bound early, so that a stage that has no replica is found before its input was made in vain.
            ready = all(producer.is_live or producer.state is TaskState.DONE for producer in inputs)
        else:
            ready = all(producer.state is TaskState.DONE for producer in inputs)
        if ready and not self._companions.must_wait(task):
            task.wait(self._now)
            self._out.append(ev.Bind(task.name, tuple(task.tried), or_else, self._companions.place(task)))

    def _bound(self, event: ev.Bound) -> None:
        task = self.tasks[event.task]
        was_binding, task.is_binding = task.is_binding, False
        task.is_bound = True
        if self._is_stopping or not was_binding:
            # Told to stop while a replica was looked for: the stop wins, nothing is submitted.
            self._release(task)
            return
        task.bind(event.replica, event.identity, self._now)
        self._submit_when_fed(task)
        for sibling in self._companions.siblings(task):
            self._advance(sibling)

    def _bind_failed(self, event: ev.BindFailed) -> None:
        task = self.tasks[event.task]
        task.is_binding = False
        if not self._is_stopping:
            self._fail(task, event.error)

    def _submit_when_fed(self, task: Task) -> None:
        """Submit a bound task: at once, or on a stream edge when the first chunk is there."""
        if task.state is not TaskState.WAITING or not task.is_bound or self._is_stopping:
            return
        if task.planned.reads_stream:
            inputs = self._edges.first_chunks(task)
            if not inputs:
                return
            more = not self._edges.is_closed(task)
        else:
            inputs = [whole_output(producer) for producer in read_by(task, self.tasks)]
            more = self._is_fed_by_client(task)
        self._submit(task, inputs, more)

    def _submit(self, task: Task, inputs: list[stage_pb.UpstreamOutput], more_input: bool) -> None:
        if task.has_used_budget:
            self._release(task)
            self._done(task, frame_pb.StageFinished(finish_reason=frame_pb.FINISH_REASON_LENGTH))
            return
        try:
            command = submission(
                self.plan,
                task,
                self.tasks,
                inputs,
                more_input=more_input,
                credit=self._edges.window(task),
                now=self._now,
                deadline=self._deadline,
            )
        except MeshError as error:
            self._release(task)
            self._fail(task, error)
            return
        task.submit(self._now)
        self._out.append(ev.Submit(task.name, command))
        if self._is_fed_by_client(task):
            self._out += [ev.Feed(task.name, append) for append in self._prompts]
        for name in task.planned.consumers:
            if self.tasks[name].planned.reads_stream:
                self._advance(self.tasks[name])

    # -- an interactive request's prompt ---------------------------------------
    def _is_fed_by_client(self, task: Task) -> bool:
        return self.plan.is_interactive and task.planned is self.plan.stages[0]

    def _prompt_arrived(self, event: ev.PromptArrived) -> None:
        if not self._is_stopping:
            self._prompts.append(event.append)
            first = self.tasks[self.plan.stages[0].name]
            if first.is_live and not first.is_aborting:
                self._out.append(ev.Feed(first.name, event.append))

    # -- running ----------------------------------------------------------------
    def _engine_started(self, event: ev.Started) -> None:
        task = self.tasks[event.task]
        task.begin(event.engine_queue_s, event.transfer_s, self._now)
        self._open_edges(task)

    def _open_edges(self, task: Task) -> None:
        if task.is_live:
            self._edges.open(task)
            self._grant_producers(task)

    def _output(self, event: ev.OutputArrived) -> None:
        task = self.tasks[event.task]
        if not task.is_live:
            return
        if task.state is TaskState.SUBMITTED:
            task.state = TaskState.STREAMING
            task.times.first_output_at = task.times.first_output_at or self._now
            self._open_edges(task)
        self._feed_consumers(task)

    def _feed_consumers(self, producer: Task) -> None:
        if self._is_stopping:
            return
        for edge in self._edges.out_of.get(producer.name, ()):
            consumer = edge.consumer
            if consumer.state is TaskState.WAITING:
                self._submit_when_fed(consumer)
            elif consumer.is_live and not consumer.is_aborting:
                chunk = edge.next_chunk()
                if chunk is not None:
                    append = stage_pb.AppendInput(chunk=chunk, last=self._edges.is_closed(consumer))
                    self._out.append(ev.Feed(consumer.name, append))

    def _input_taken(self, event: ev.InputTaken) -> None:
        task = self.tasks[event.task]
        self._edges.take(task, event.chunks)
        self._grant_producers(task)
        self._let_go_of_input(task)

    def _grant_producers(self, consumer: Task) -> None:
        for producer, units in self._edges.new_credit(consumer):
            self._out.append(ev.Grant(producer.name, units))

    def _let_go_of_input(self, consumer: Task) -> None:
        """Drop pieces that all readers of a stream have, once none can begin anew: else they pile up to the end."""
        for producer in self._edges.producers(consumer):
            count = self._edges.read_by_all(producer)
            if count <= producer.output.let_go or producer.planned.is_output:
                continue
            if any(self._may_read_again(self.tasks[name]) for name in producer.planned.consumers):
                continue
            if references := producer.output.let_go_of(count):
                self._out.append(ev.ReleaseTensors(references))

    def _may_read_again(self, task: Task) -> bool:
        if task.state is TaskState.DONE:
            return False
        return not task.planned.reads_stream or not task.is_live or self._losses.can_go_on(task)

    # -- ending a task ----------------------------------------------------------
    def _finished(self, event: ev.Finished) -> None:
        task = self.tasks[event.task]
        if not task.is_live:
            return
        self._release(task)
        if task.restart_when_stopped and not self._is_stopping:
            self._restart(task)
        else:
            self._done(task, event.finished)

    def _done(self, task: Task, finished: frame_pb.StageFinished) -> None:
        task.done(self._now)
        task.finished = complete(task, finished, self._now)
        if self.is_ended:
            return
        if task.planned.is_output:
            self._out.append(ev.DeliverFinished(task.name))
        self._feed_consumers(task)
        self._grant_producers(task)
        self._let_go_of_input(task)
        if self._companions.late(task):
            self._out.append(ev.AwaitCompanions(self._companions.limit_s))
        if self._all_outputs_done:
            self._end(finished=frame_pb.FINISH_REASON_COMPLETE)
            return
        if self.stop is not None:
            self._end_when_stopped()
            return
        for name in task.planned.consumers:
            self._advance(self.tasks[name])

    def _failed(self, event: ev.Failed | ev.Lost) -> None:
        self._broke_off(self.tasks[event.task], event.error)

    def _aborted(self, event: ev.Aborted) -> None:
        task = self.tasks[event.task]
        # An error only where nobody here asked for it.
        error = MeshError(Reason.STAGE_FAILED, f"stage {task.stage_name!r}: the replica aborted the task")
        self._broke_off(task, error, event.usage)

    def _broke_off(self, task: Task, error: MeshError, usage: frame_pb.Usage | None = None) -> None:
        """The replica is done with a task, without a result."""
        if not task.is_live:
            return
        self._release(task)
        if self._is_stopping:
            task.state = TaskState.ABORTED
            task.finished = cut_short(task, usage, self._now)
            self._end_when_stopped()
        elif task.restart_when_stopped:
            self._restart(task)
        elif error.reason in RETRY_ELSEWHERE:
            self._recover(task, error)
        else:
            self._fail(task, error)

    # -- going on elsewhere -------------------------------------------------------
    def _recover(self, task: Task, error: MeshError) -> None:
        """Start a lost task's next attempt, from where it was or from its beginning, if it may have one."""
        verdict = self._losses.decide(task, error, self._now)
        if isinstance(verdict, Fails):
            # Which may name a consumer; that one is still at work, and is stopped like the others.
            verdict.error.metadata.setdefault("stage", verdict.task.stage_name)
            self._fail(task, verdict.error)
            return
        if verdict.restarts:
            self._forget_output(task)
        task.state = TaskState.WAITING
        self._edges.reset(task)
        for consumer in verdict.consumers:
            self._restart_consumer(consumer)
        # A replica that is full says so at once; waiting for it would only hide the queue.
        self._advance(task, or_else=error if error.reason is Reason.OVERLOADED else None)

    def _restart_consumer(self, consumer: Task) -> None:
        if consumer.is_live:
            consumer.restart_when_stopped = True
            self._abort_task(consumer, "its input starts anew")
        elif consumer.state is TaskState.DONE:
            self._restart(consumer)
        else:
            self._edges.restart(consumer)

    def _restart(self, task: Task) -> None:
        """Back to the beginning, after the replica let go of the task."""
        self._forget_output(task)
        self._edges.restart(task)
        task.reset()
        task.recovery = ResumeMode.RESTARTED.value
        self._advance(task)

    def _forget_output(self, task: Task) -> None:
        if self._losses.is_delivered(task):
            task.skip_media = max(task.skip_media, len(task.output.pieces))
        task.output.clear()


_STEPS: dict[type[ev.Event], Callable[[RequestMachine, Any], None]] = {
    ev.Start: RequestMachine._start,
    ev.Expanded: RequestMachine._expanded,
    ev.ExpandFailed: RequestMachine._expand_failed,
    ev.CompanionsLate: RequestMachine._companions_late,
    ev.Bound: RequestMachine._bound,
    ev.BindFailed: RequestMachine._bind_failed,
    ev.Started: RequestMachine._engine_started,
    ev.OutputArrived: RequestMachine._output,
    ev.InputTaken: RequestMachine._input_taken,
    ev.PromptArrived: RequestMachine._prompt_arrived,
    ev.Finished: RequestMachine._finished,
    ev.Failed: RequestMachine._failed,
    ev.Lost: RequestMachine._failed,
    ev.Aborted: RequestMachine._aborted,
    ev.Stop: RequestMachine._stop,
    ev.StopTimeout: RequestMachine._stop_timeout,
}

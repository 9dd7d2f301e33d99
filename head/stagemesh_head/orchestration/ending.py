"""How a request ends: once, with all its tasks told to stop and every place on a replica given back once."""

from __future__ import annotations

from stagemesh.rpc.errors import MeshError
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh_head.orchestration import events as ev
from stagemesh_head.orchestration.companions import name_companion
from stagemesh_head.orchestration.plan import Plan
from stagemesh_head.orchestration.summary import cut_short, end_of
from stagemesh_head.orchestration.task import OVER, Task, TaskState


class Ending:
    """The part of a request's state machine that ends it; no I/O."""

    def __init__(self, plan: Plan, now: float) -> None:
        self.plan = plan
        self.tasks = {planned.name: Task(planned.name, planned) for planned in plan.stages}
        self.is_ended = False
        self.stop: ev.Stop | None = None
        """Set once it was told to stop."""
        self._started_at = now
        self._now = now
        self._out: list[ev.Command] = []

    @property
    def is_quiet(self) -> bool:
        """Whether it ended and no replica can still be at work for it."""
        return self.is_ended and not any(task.is_bound or task.is_binding for task in self.tasks.values())

    @property
    def unconfirmed(self) -> list[str]:
        """Tasks that may still be at work."""
        return [task.name for task in self.tasks.values() if task.is_live]

    def collapse(self) -> None:
        """Take no further part: the request ends by other means, and what it had was released."""
        self.is_ended = True
        for task in self.tasks.values():
            task.is_bound = task.is_binding = False
            if task.state not in OVER:
                task.state = TaskState.FAILED

    @property
    def _is_stopping(self) -> bool:
        return self.is_ended or self.stop is not None

    @property
    def _all_outputs_done(self) -> bool:
        return all(task.state is TaskState.DONE for task in self.tasks.values() if task.planned.is_output)

    def _fail(self, task: Task, error: MeshError) -> None:
        task.state = TaskState.FAILED
        self._end(error=name_companion(self.plan, task, error))

    def _stop(self, event: ev.Stop) -> None:
        if self.is_ended:
            return
        first, self.stop = self.stop is None, event
        if first:
            self._stop_tasks(event.cause.value)
        if event.cause is ev.StopCause.ASKED:
            self._end_when_stopped()
        else:
            self._end(error=event.error)

    def _stop_timeout(self, event: ev.StopTimeout) -> None:
        if self.stop is not None and not self.is_ended:
            self._end_stopped()

    def _stop_tasks(self, reason: str) -> None:
        for task in self.tasks.values():
            if task.is_live:
                self._abort_task(task, reason)
            elif task.state not in OVER:
                if task.is_binding:
                    task.is_binding = False
                    self._out.append(ev.CancelBind(task.name))
                if task.is_bound:
                    self._release(task)
                task.state = TaskState.ABORTED

    def _release(self, task: Task) -> None:
        task.is_bound = False
        if task.is_aborting:
            task.times.abort_s = self._now - task.times.abort_at
            task.is_aborting = False
        self._out.append(ev.Release(task.name))

    def _abort_task(self, task: Task, reason: str) -> None:
        if not task.is_aborting:
            task.is_aborting = True
            task.times.abort_at = self._now
            self._out.append(ev.AbortTask(task.name, reason))

    def _end_when_stopped(self) -> None:
        if not self.is_ended and not any(task.is_live for task in self.tasks.values()):
            self._end_stopped()

    def _end_stopped(self) -> None:
        """End well, with what there is."""
        for task in self.tasks.values():
            if task.planned.is_output and task.state is not TaskState.DONE and task.attempt:
                task.finished = task.finished or cut_short(task, None, self._now)
                self._out.append(ev.DeliverFinished(task.name))
        self._end(finished=frame_pb.FINISH_REASON_ABORT)

    def _end(self, *, finished: frame_pb.FinishReason.ValueType | None = None, error: MeshError | None = None) -> None:
        if self.is_ended:
            return
        self.is_ended = True
        end = None
        if finished is not None:
            end = end_of(list(self.tasks.values()), finished, self._started_at, self._now)
        self._out.append(ev.End(end, error))
        self._stop_tasks("the request is over" if error is None else "the request failed")

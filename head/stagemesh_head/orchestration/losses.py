"""What the loss of a replica means for a request: decisions only; the state machine carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from stagemesh.rpc.errors import MeshError
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh_head.orchestration.edges import StreamEdges
from stagemesh_head.orchestration.plan import Plan
from stagemesh_head.orchestration.recovery import SEVERITY, RecoveryLimits, ResumeMode, loss_error, mode_after_loss
from stagemesh_head.orchestration.task import Task, TaskState


@dataclass(frozen=True, slots=True)
class Survives:
    """The task goes on elsewhere."""

    restarts: bool
    """From its beginning; else from the output so far."""
    consumers: tuple[Task, ...]
    """Tasks that read the lost output as a stream and must begin anew too, nearest first."""


@dataclass(frozen=True, slots=True)
class Fails:
    """The request fails at a task."""

    task: Task
    error: MeshError


class Losses:
    """The losses of one request, and the bounds on surviving them."""

    def __init__(self, plan: Plan, edges: StreamEdges, limits: RecoveryLimits) -> None:
        self._plan = plan
        self._edges = edges
        self._limits = limits
        self._first_at: float | None = None

    def decide(self, task: Task, error: MeshError, now: float) -> Survives | Fails:
        """Whether and how a task that lost its replica because of `error` goes on; notes it in `task.recovery`."""
        self._first_at = now if self._first_at is None else self._first_at
        has_time = now - self._first_at <= self._limits.max_total_s
        mode = self._mode(task)
        if mode is None or task.attempt >= self._limits.max_attempts or not has_time:
            return self._fails(task, error)
        consumers: list[Task] = []
        if mode is ResumeMode.RESTARTED:
            stuck = self._collect(task, consumers)
            if stuck is not None:
                return self._fails(stuck, error)
        if SEVERITY[mode.value] > SEVERITY[task.recovery]:
            task.recovery = mode.value
        return Survives(mode is ResumeMode.RESTARTED, tuple(consumers))

    def can_go_on(self, task: Task) -> bool:
        """Whether a running task would go on elsewhere after a loss, as far as its output tells."""
        mode = self._mode(task)
        return mode is not None and (mode is not ResumeMode.RESTARTED or self._collect(task, []) is None)

    def _mode(self, task: Task) -> ResumeMode | None:
        exact_only = self._plan.request.recovery_policy == inference_pb.RECOVERY_POLICY_EXACT_OR_FAIL
        return mode_after_loss(task, is_delivered=self.is_delivered(task), exact_or_fail=exact_only)

    def is_delivered(self, task: Task) -> bool:
        """Whether the client may have some of the task's output, or its end."""
        if not task.planned.is_output:
            return False
        return task.state is TaskState.DONE or (self._plan.is_delta and not task.output.is_empty)

    def _fails(self, task: Task, error: MeshError) -> Fails:
        return Fails(task, loss_error(task, error, is_delivered=self.is_delivered(task)))

    def _collect(self, task: Task, found: list[Task]) -> Task | None:
        """Add the tasks that read `task` as a stream, and theirs; returns one that cannot begin anew."""
        for edge in self._edges.out_of.get(task.name, ()):
            consumer = edge.consumer
            if consumer.state is not TaskState.WAITING and self.is_delivered(consumer):
                return consumer
            if consumer not in found:
                found.append(consumer)
                stuck = self._collect(consumer, found)
                if stuck is not None:
                    return stuck
        return None

"""The companions of one request: further visits to its first stage, beside its own, for the same consumers.

Pure, as the state machine that asks it. A request and its companions are siblings here: wherever one of them is, the
others go (their prompts share a prefix, and their consumer needs all of them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh_head.orchestration.plan import Companion, Plan
from stagemesh_head.orchestration.recovery import resume_mode
from stagemesh_head.orchestration.task import Task, TaskState


class Companions:
    """Adds companions to the tasks of a request, and says what a task owes to its siblings."""

    def __init__(self, plan: Plan, tasks: dict[str, Task]) -> None:
        self._plan = plan
        self._tasks = tasks
        self._parent = tasks[plan.stages[0].name]
        self._made: list[Task] = []

    @property
    def are_wanted(self) -> bool:
        """Whether a stage that has not begun reads companions."""
        return any(self._tasks[name].state is TaskState.WAITING for name in self._plan.companion_readers)

    def add(self, companions: Sequence[Companion]) -> None:
        """Give each companion a task, and its output to the stages that read the request's own."""
        stage, readers = self._parent.planned, self._plan.companion_readers
        for companion in companions:
            name = f"{stage.name} (companion {companion.suffix})"
            planned = replace(
                stage,
                name=name,
                consumers=readers,
                is_output=False,
                params=companion.params,
                resume=resume_mode(companion.params),
            )
            task = self._tasks[name] = Task(name, planned, companion=companion)
            self._made.append(task)
        names = tuple(task.name for task in self._made)
        for reader in readers:
            planned = self._tasks[reader].planned
            place = planned.inputs.index(stage.name) + 1
            inputs = (*planned.inputs[:place], *names, *planned.inputs[place:])
            self._tasks[reader].planned = replace(planned, inputs=inputs)

    def siblings(self, task: Task) -> list[Task]:
        """The others of a task's family; none for a task without one."""
        family = [self._parent, *self._made]
        return [other for other in family if other is not task] if task in family else []

    def must_wait(self, task: Task) -> bool:
        """Whether a sibling looks for a replica just now, so that the task shall follow it."""
        return any(other.is_binding for other in self.siblings(task))

    def place(self, task: Task) -> tuple[int, str, int] | None:
        """The replica that a sibling is on, unless the task was lost there."""
        places = [other.tried[-1] for other in self.siblings(task) if other.is_bound]
        return next((place for place in places if place not in task.tried), None)

    def late(self, finished: Task) -> list[Task]:
        """Companions that a stage's finished output still waits for."""
        return [task for task in self._made if task.state is not TaskState.DONE] if finished is self._parent else []

    @property
    def limit_s(self) -> float:
        """Longest such wait, in seconds."""
        return self._parent.planned.stage.limits.companion_timeout

    def too_late(self) -> MeshError | None:
        """After that wait: the error to end the request with, about a companion that is not there."""
        late = self.late(self._parent)
        if not late:
            return None
        message = f"was not done {self.limit_s:g} s after its request's own output (limits.companion_timeout)"
        return name_companion(self._plan, late[0], MeshError(Reason.REQUEST_TIMEOUT, message))


def name_companion(plan: Plan, task: Task, error: MeshError) -> MeshError:
    """An error of a task, saying of which companion when it is one."""
    error.metadata.setdefault("stage", task.stage_name)
    if task.companion is None:
        return error
    name, role = plan.request_id + task.companion.suffix, task.companion.role
    told = MeshError(
        error.reason, f"companion {name} (role {role!r}): {error.message}", retry_delay_s=error.retry_delay_s
    )
    told.metadata = {**error.metadata, "companion": name}
    return told

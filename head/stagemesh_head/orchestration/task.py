"""One task: a request's visit to one stage, and what came of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stagemesh.references import reference_in
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh_head.orchestration.plan import Companion, PlannedStage


class TaskState(Enum):
    """Where a task stands; the values are what `ListRequests` shows."""

    WAITING = "waiting"
    SUBMITTED = "submitted"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


RUNNING = frozenset({TaskState.SUBMITTED, TaskState.STREAMING})
OVER = frozenset({TaskState.DONE, TaskState.FAILED, TaskState.ABORTED})


class TaskOutput:
    """All that a stage has sent, in the form in which it is forwarded, fed to later stages and replayed."""

    __slots__ = ("_abandoned", "deltas", "let_go", "pieces", "texts", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        """Of completion 0, all attempts."""
        self.texts: list[str] = []
        """Their text, in pieces."""
        self.deltas: list[frame_pb.TextDelta] = []
        """Text that came with log-probabilities or of several completions; what is of completion 0 is also above."""
        self.pieces: list[frame_pb.Frame] = []
        """Media, sound and tensors, in order."""
        self.let_go = 0
        """So many of them, from the first, are empty by now: nobody needs them again."""
        self._abandoned: list[tensor_pb.TensorRef] = []
        """Tensors of earlier starts."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing arrived yet."""
        return not (self.token_ids or self.texts or self.deltas or self.pieces)

    @property
    def text(self) -> str:
        """The text of completion 0 so far."""
        return "".join(self.texts)

    def references(self) -> list[tensor_pb.TensorRef]:
        """Tensors that their producers keep for it, those of earlier starts too."""
        return [*self._abandoned, *(ref for frame in self.pieces if (ref := reference_in(frame)) is not None)]

    def let_go_of(self, count: int) -> list[tensor_pb.TensorRef]:
        """Empty the first `count` pieces, which keep their places; returns what their producers kept for them."""
        gone = self.pieces[self.let_go : count]
        self.pieces[self.let_go : count] = [frame_pb.Frame() for _ in gone]
        self.let_go = max(count, self.let_go)
        return [ref for frame in gone if (ref := reference_in(frame)) is not None]

    def clear(self) -> None:
        """Forget all, for a new start."""
        self._abandoned = self.references()
        self.let_go = 0
        for parts in (self.token_ids, self.texts, self.deltas, self.pieces):
            parts.clear()


@dataclass(slots=True)
class Times:
    """A task's moments on the monotonic clock, and what its replica said, in seconds."""

    waiting_since: float = 0.0
    queue_s: float = 0.0
    submitted_at: float = 0.0
    first_output_at: float = 0.0
    done_at: float = 0.0
    engine_queue_s: float = 0.0
    transfer_s: float = 0.0
    began_at: float = 0.0
    """When the engine began with the last attempt; 0: it has not."""
    last_engine_queue_s: float = 0.0
    """Of the last attempt alone."""
    abort_at: float = 0.0
    abort_s: float | None = None
    """From the last abort until the replica let go of the task."""


@dataclass(slots=True, eq=False)
class Task:
    """A visit to one stage. The request's state machine alone changes it, but for `output`."""

    name: str
    """Stage name; a companion's says which one it is."""
    planned: PlannedStage
    companion: Companion | None = None
    """What it is when it is not the request's own visit."""
    state: TaskState = TaskState.WAITING
    attempt: int = 0
    is_binding: bool = False
    """It waits for a replica."""
    is_bound: bool = False
    """It has a place on a replica that must be released."""
    is_aborting: bool = False
    """It was told to stop; its terminal event is awaited."""
    restart_when_stopped: bool = False
    """The stop is for a new start."""
    tried: list[tuple[int, str, int]] = field(default_factory=list)
    """Replica id, incarnation and link session of attempts that were lost."""
    replicas: list[replica_pb.ReplicaRef] = field(default_factory=list)
    recovery: str = ""
    output: TaskOutput = field(default_factory=TaskOutput)
    skip_media: int = 0
    """Media files to leave out of a restarted attempt, since the client has them."""
    finished: frame_pb.StageFinished | None = None
    times: Times = field(default_factory=Times)

    @property
    def stage_name(self) -> str:
        """The stage that is visited."""
        return self.planned.stage.name

    @property
    def is_live(self) -> bool:
        """Whether a replica works on it, or may."""
        return self.state in RUNNING

    @property
    def has_used_budget(self) -> bool:
        """Whether a task that lost its replica had nothing left to say but its end."""
        llm = self.planned.params.llm
        had = len(self.output.token_ids)
        return bool(had) and llm.HasField("max_tokens") and had >= llm.max_tokens

    def wait(self, now: float) -> None:
        """Begin the next attempt: a replica is looked for."""
        self.attempt += 1
        self.is_binding = True
        self.times.waiting_since = now
        self.times.began_at = 0.0

    def bind(self, replica: replica_pb.ReplicaRef, identity: tuple[int, str, int], now: float) -> None:
        """A replica was found."""
        self.times.queue_s += now - self.times.waiting_since
        self.tried.append(identity)
        self.replicas.append(replica)

    def submit(self, now: float) -> None:
        """The replica has the task from now on."""
        self.state = TaskState.SUBMITTED
        self.times.submitted_at = self.times.submitted_at or now

    def begin(self, engine_queue_s: float, transfer_s: float, now: float) -> None:
        """The engine has it, after so many seconds of waiting and of bringing inputs inside the replica."""
        times = self.times
        times.began_at, times.last_engine_queue_s = now, engine_queue_s
        times.engine_queue_s += engine_queue_s
        times.transfer_s += transfer_s

    def done(self, now: float) -> None:
        """It ended well."""
        self.state = TaskState.DONE
        self.times.first_output_at = self.times.first_output_at or now
        self.times.done_at = now

    def reset(self) -> None:
        """Back to the beginning, without the replica having done anything wrong: it may be taken again."""
        self.state = TaskState.WAITING
        self.restart_when_stopped = False
        self.finished = None
        self.attempt -= 1
        self.tried.pop()

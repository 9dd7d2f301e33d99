"""What a request's state machine hears and what it orders: plain data, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from stagemesh.rpc.errors import MeshError
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh_head.orchestration.plan import Companion

# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Start:
    """The request was admitted."""


@dataclass(frozen=True, slots=True)
class Expanded:
    """The request's companions, all of them."""

    companions: Sequence[Companion]


@dataclass(frozen=True, slots=True)
class ExpandFailed:
    """There are no companions to be had."""

    error: MeshError


@dataclass(frozen=True, slots=True)
class CompanionsLate:
    """The request's own output has waited long enough for its companions."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A replica was reserved for a task."""

    task: str
    replica: replica_pb.ReplicaRef
    identity: tuple[int, str, int]


@dataclass(frozen=True, slots=True)
class BindFailed:
    """No replica can be had."""

    task: str
    error: MeshError


@dataclass(frozen=True, slots=True)
class Started:
    """The engine began with a task; seconds of waiting and of bringing inputs inside the replica."""

    task: str
    engine_queue_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class OutputArrived:
    """A task's output grew. Needed for its first output, and where a later stage reads it as a stream."""

    task: str


@dataclass(frozen=True, slots=True)
class InputTaken:
    """The engine of a task took chunks of further input."""

    task: str
    chunks: int


@dataclass(frozen=True, slots=True)
class PromptArrived:
    """The client of an interactive request sent more; the command is complete but for its slot."""

    append: stage_pb.AppendInput


@dataclass(frozen=True, slots=True)
class Finished:
    """A task ended well."""

    task: str
    finished: frame_pb.StageFinished


@dataclass(frozen=True, slots=True)
class Failed:
    """A task failed, in the replica's words."""

    task: str
    error: MeshError


@dataclass(frozen=True, slots=True)
class Aborted:
    """The engine let go of a task."""

    task: str
    usage: frame_pb.Usage | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """The link to a task's replica broke, or the submission could not be sent."""

    task: str
    error: MeshError


class StopCause(Enum):
    """Why a request is told to stop."""

    ASKED = "asked"
    """By AbortRequest: the stream ends well once the stages confirmed, with what there is."""
    CLIENT_LEFT = "the client left"
    FAILED = "failed"
    """By an error of the mesh's own, such as the deadline: the stream ends with it at once."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The request shall end."""

    cause: StopCause
    error: MeshError | None = None


@dataclass(frozen=True, slots=True)
class StopTimeout:
    """The stages had time enough to confirm."""


Event = (
    Start
    | Expanded
    | ExpandFailed
    | CompanionsLate
    | Bound
    | BindFailed
    | Started
    | OutputArrived
    | InputTaken
    | PromptArrived
    | Finished
    | Failed
    | Aborted
    | Lost
    | Stop
    | StopTimeout
)

# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Expand:
    """Make the request's companions; answered by Expanded or ExpandFailed."""


@dataclass(frozen=True, slots=True)
class AwaitCompanions:
    """Tell CompanionsLate after a time."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Bind:
    """Reserve a replica for a task; answered by Bound or BindFailed."""

    task: str
    excluded: Sequence[tuple[int, str, int]]
    or_else: MeshError | None = None
    """Why not to wait, when no replica can take the task at once."""
    beside: tuple[int, str, int] | None = None
    """The replica to take if it can be had."""


@dataclass(frozen=True, slots=True)
class CancelBind:
    """Wait no longer for a replica."""

    task: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Send a task to its replica."""

    task: str
    command: stage_pb.SubmitTask


@dataclass(frozen=True, slots=True)
class Feed:
    """Send a running task further input."""

    task: str
    append: stage_pb.AppendInput
    """Complete but for its slot."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Let a task send more."""

    task: str
    units: int


@dataclass(frozen=True, slots=True)
class ReleaseTensors:
    """Have replicas drop what nobody needs any more."""

    references: Sequence[tensor_pb.TensorRef]


@dataclass(frozen=True, slots=True)
class AbortTask:
    """Stop a task on its replica; answered by its terminal event."""

    task: str
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Give a task's place on its replica back."""

    task: str


@dataclass(frozen=True, slots=True)
class DeliverFinished:
    """Tell the client that an output stage is done, after what is left of its output."""

    task: str


@dataclass(frozen=True, slots=True)
class End:
    """End the client's stream: exactly one of the two is set, unless the client left."""

    finished: inference_pb.RequestFinished | None = None
    error: MeshError | None = None


Command = (
    Expand
    | AwaitCompanions
    | Bind
    | CancelBind
    | Submit
    | Feed
    | Grant
    | ReleaseTensors
    | AbortTask
    | Release
    | DeliverFinished
    | End
)

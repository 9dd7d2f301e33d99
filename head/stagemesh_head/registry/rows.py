"""The registry's rows as the rest of the head sees them, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from stagemesh.v1 import replica_pb2 as replica_pb


class ReplicaState(Enum):
    """Where a replica stands; values are those of `stagemesh.v1.ReplicaState`."""

    ASSIGNED = replica_pb.REPLICA_STATE_ASSIGNED
    STARTING = replica_pb.REPLICA_STATE_STARTING
    READY = replica_pb.REPLICA_STATE_READY
    SUSPECT = replica_pb.REPLICA_STATE_SUSPECT
    DRAINING = replica_pb.REPLICA_STATE_DRAINING
    GONE = replica_pb.REPLICA_STATE_GONE
    FAILED = replica_pb.REPLICA_STATE_FAILED


@dataclass(frozen=True, slots=True, order=True)
class ReplicaKey:
    """One slot of one stage of one pipeline."""

    pipeline: str
    stage: str
    replica_id: int

    @classmethod
    def of(cls, ref: replica_pb.ReplicaRef) -> ReplicaKey:
        """The slot that a reference on the wire means."""
        return cls(ref.pipeline, ref.stage, ref.replica_id)

    def ref(self, incarnation: str = "") -> replica_pb.ReplicaRef:
        """Its name on the wire; with an incarnation, one process in it."""
        return replica_pb.ReplicaRef(
            pipeline=self.pipeline, stage=self.stage, replica_id=self.replica_id, incarnation=incarnation
        )

    def __str__(self) -> str:
        return f"{self.pipeline}/{self.stage}/{self.replica_id}"


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """What the mesh knows of one replica."""

    key: ReplicaKey
    incarnation: str
    """Random id of its process start; empty while none runs."""
    node_id: str
    state: ReplicaState
    endpoint: str = ""
    """host:port of its services, set once READY."""
    pipeline_revision: str = ""
    device_ids: tuple[str, ...] = ()
    load: replica_pb.ReplicaLoad | None = None
    phase: str = ""
    reason: str = ""
    """Why the state is what it is, in words."""
    pid: int = 0
    restarts: int = 0


class Membership(Protocol):
    """The source of rows: the registry inside the head, or a follower of `WatchReplicas` inside a gateway."""

    def rows(self) -> Iterable[ReplicaRow]:
        """All rows there are now."""

    def subscribe(self, listener: Callable[[ReplicaKey, ReplicaRow | None], None]) -> Callable[[], None]:
        """Call `listener(key, row)` at every change, `None` when the row is no more; returns the unsubscriber.

        Called synchronously on the event loop, in order; the listener must not raise nor block.
        """

    def link_changed(self, key: ReplicaKey, incarnation: str, up: bool, reason: str) -> None:
        """This head's link to a replica opened (`up`) or broke. A broken link makes a READY replica SUSPECT."""

"""What the membership machine wants done. The shell in `registry.py` does it, in order."""

from __future__ import annotations

from dataclasses import dataclass

from stagemesh.rpc.errors import MeshError
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh_head.registry.rows import ReplicaKey, ReplicaRow


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on a session."""

    session: int
    message: registry_pb.JoinResponse


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End a session; `error` None ends it with OK."""

    session: int
    error: MeshError | None


@dataclass(frozen=True, slots=True)
class RowChanged:
    """A replica's row is new or different; `row` None: it is no more."""

    key: ReplicaKey
    row: ReplicaRow | None
    incarnation: str
    """Of the row that changed or went."""
    only_load: bool = False


@dataclass(frozen=True, slots=True)
class Happened:
    """Something for the event log."""

    type: str
    node_id: str
    key: ReplicaKey | None = None
    incarnation: str = ""
    reason: str = ""
    from_state: str = ""
    to_state: str = ""


Effect = Send | CloseSession | RowChanged | Happened

"""Which replica this process is, and the fence against messages that mean an earlier one."""

from __future__ import annotations

from dataclasses import dataclass

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import replica_pb2 as replica_pb


@dataclass(frozen=True, slots=True)
class Identity:
    """One process start of one slot."""

    pipeline: str
    pipeline_revision: str
    stage: str
    replica_id: int
    incarnation: str

    @property
    def reference(self) -> replica_pb.ReplicaRef:
        """As the wire says it."""
        return replica_pb.ReplicaRef(
            pipeline=self.pipeline, stage=self.stage, replica_id=self.replica_id, incarnation=self.incarnation
        )

    def check(self, meant: replica_pb.ReplicaRef) -> None:
        """Refuse a peer that means another replica. Raises MeshError (UNKNOWN_REPLICA, STALE_INCARNATION)."""
        mine = (self.pipeline, self.stage, self.replica_id)
        theirs = (meant.pipeline, meant.stage, meant.replica_id)
        if mine != theirs:
            raise MeshError(
                Reason.UNKNOWN_REPLICA,
                f"this is {_name(*mine)}, not {_name(*theirs)}",
                here=_name(*mine),
                wanted=_name(*theirs),
            )
        if meant.incarnation != self.incarnation:
            raise MeshError(
                Reason.STALE_INCARNATION,
                f"{_name(*mine)} runs as incarnation {self.incarnation}, not {meant.incarnation or '(none)'}",
                replica=_name(*mine),
                incarnation=self.incarnation,
            )


def _name(pipeline: str, stage: str, replica_id: int) -> str:
    return f"{pipeline}/{stage}/{replica_id}"

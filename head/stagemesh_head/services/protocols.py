"""What the servicers need of other rooms, so that they know neither of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh_head.registry.rows import ReplicaKey


class RequestDirectory(Protocol):
    """The requests in flight on this head."""

    def requests(self, pipeline: str) -> Iterable[admin_pb.RequestInfo]:
        """Those of a pipeline (empty: all), oldest first."""

    def inflight(self, key: ReplicaKey) -> int:
        """Tasks that this head has bound to a replica now."""


class StageCaller(Protocol):
    """Runs a control method on all replicas of some stages."""

    async def call(
        self,
        pipeline: str,
        stages: Sequence[str],
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout_s: float,
    ) -> list[admin_pb.ReplicaCallResult]:
        """One result per replica, by stage and replica id; a replica's failure is its own result.

        Args:
            pipeline: a pipeline that the head serves.
            stages: names of its stages; never empty.
            args, kwargs: plain JSON values.
            timeout_s: for the whole call.

        Raises:
            MeshError: METHOD_NOT_ALLOWED.
        """

"""The operator's calls, for the command line and for programs that steer a mesh.

Answers are the messages of `stagemesh.v1.admin_pb2` and `registry_pb2`, whose comments explain every field; pages are
followed. The caller's token, where there are any, must have the role `operator`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import grpc
from google.protobuf import json_format, struct_pb2

from stagemesh.addresses import default_head
from stagemesh.client.connection import CALL_TIMEOUT_S, PAGE_SIZE
from stagemesh.client.errors import StageMeshError, closed_here, from_call, typed
from stagemesh.client.sync import open_sync_channel
from stagemesh.rpc.errors import MeshError
from stagemesh.rpc.security import Security
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import admin_pb2_grpc as admin_grpc
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh.wire import duration

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class ReplicaCall:
    """One replica's answer to a collective call."""

    stage: str
    replica_id: int
    result: Any = None
    """What the method returned, as JSON has it."""
    error: StageMeshError | None = None


class AdminClient:
    """Speaks to a head as an operator. Safe to share between threads."""

    def __init__(self, address: str | None = None, *, security: Security | None = None) -> None:
        self.address = address or default_head()
        self._channel = open_sync_channel(self.address, security or Security.from_environment())
        self._stub = admin_grpc.AdminServiceStub(self._channel)
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls end with RequestAborted."""
        self._is_closed = True
        self._channel.close()

    def list_nodes(self) -> list[admin_pb.NodeInfo]:
        """Nodes by id."""
        request = admin_pb.ListNodesRequest(page_size=PAGE_SIZE)
        return [node for page in self._pages(self._stub.ListNodes, request) for node in page.nodes]

    def list_replicas(
        self, *, pipeline: str = "", stage: str = "", include_gone: bool = False
    ) -> tuple[list[registry_pb.ReplicaStatus], list[admin_pb.MissingSlot]]:
        """Replicas by pipeline, stage and id; and the slots that no node has taken, with the reason."""
        request = admin_pb.ListReplicasRequest(
            pipeline=pipeline, stage=stage, include_gone=include_gone, page_size=PAGE_SIZE
        )
        replicas: list[registry_pb.ReplicaStatus] = []
        missing: dict[tuple[str, str, int], admin_pb.MissingSlot] = {}
        for page in self._pages(self._stub.ListReplicas, request):
            replicas += page.replicas
            missing |= {(m.replica.pipeline, m.replica.stage, m.replica.replica_id): m for m in page.missing}
        return replicas, list(missing.values())

    def list_requests(self, *, pipeline: str = "") -> list[admin_pb.RequestInfo]:
        """Requests in flight, oldest first."""
        request = admin_pb.ListRequestsRequest(pipeline=pipeline, page_size=PAGE_SIZE)
        return [row for page in self._pages(self._stub.ListRequests, request) for row in page.requests]

    def drain_replica(
        self, pipeline: str, stage: str, replica_id: int, *, grace_s: float, reason: str = ""
    ) -> registry_pb.ReplicaStatus:
        """Give a replica nothing new, let it finish within `grace_s` seconds, and remove it."""
        request = admin_pb.DrainReplicaRequest(
            replica=replica_pb.ReplicaRef(pipeline=pipeline, stage=stage, replica_id=replica_id),
            grace=duration(grace_s),
            reason=reason,
            request_id=_new_id(),
        )
        return self._call(self._stub.DrainReplica, request).replica

    def drain_node(self, node_id: str, *, grace_s: float, reason: str = "") -> admin_pb.NodeInfo:
        """Let a node finish what it has within `grace_s` seconds, and leave."""
        request = admin_pb.DrainNodeRequest(
            node_id=node_id, grace=duration(grace_s), reason=reason, request_id=_new_id()
        )
        return self._call(self._stub.DrainNode, request).node

    def scale_stage(self, stage: str, replicas: int, *, pipeline: str = "") -> admin_pb.ScaleStageResponse:
        """Set how many replicas a stage should have."""
        request = admin_pb.ScaleStageRequest(pipeline=pipeline, stage=stage, replicas=replicas, request_id=_new_id())
        return self._call(self._stub.ScaleStage, request)

    def call_stages(
        self,
        method: str,
        *args: Any,
        pipeline: str = "",
        stages: Sequence[str] = (),
        timeout_s: float = 30.0,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[ReplicaCall]:
        """Run a control method on every replica of `stages` (empty: all); one answer a replica."""
        request = admin_pb.CallStagesRequest(
            pipeline=pipeline,
            stages=stages,
            method=method,
            args=json_format.Parse(json.dumps(args), struct_pb2.ListValue()),
            kwargs=json_format.ParseDict(dict(kwargs or {}), struct_pb2.Struct()),
            timeout=duration(timeout_s),
        )
        response = self._call(self._stub.CallStages, request, timeout_s + CALL_TIMEOUT_S)
        return [_replica_call(row) for row in response.results]

    def watch_events(self, *, include_past: bool = False) -> Iterator[admin_pb.MeshEvent]:
        """What happens to nodes and replicas, as it happens. Leaving the iterator ends the watch."""
        # A watch has no end of its own: its owner is who iterates, and keepalive notices a dead head.
        call = self._stub.WatchEvents(admin_pb.WatchEventsRequest(include_past=include_past))
        try:
            for response in call:
                yield response.event
        except grpc.RpcError as error:
            raise from_call(error, self.address) from None
        finally:
            call.cancel()

    def _pages(self, method: Callable[..., Answer], request: Any) -> Iterator[Answer]:
        while True:
            page: Any = self._call(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def _call(self, method: Callable[..., Answer], request: Any, timeout: float = CALL_TIMEOUT_S) -> Answer:
        try:
            return method(request, timeout=timeout)
        except (grpc.RpcError, ValueError) as error:  # ValueError is gRPC's word for a closed channel
            if self._is_closed:
                raise closed_here() from None
            if isinstance(error, ValueError):
                raise
            raise from_call(error, self.address) from None


def _replica_call(row: admin_pb.ReplicaCallResult) -> ReplicaCall:
    if row.WhichOneof("outcome") == "error":
        return ReplicaCall(row.replica.stage, row.replica.replica_id, error=typed(MeshError.from_status(row.error)))
    return ReplicaCall(row.replica.stage, row.replica.replica_id, json_format.MessageToDict(row.result))


def _new_id() -> str:
    return f"op-{uuid.uuid4().hex}"

"""Control calls to replicas, beside the streams that carry tasks: they never delay a token or an abort."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from google.protobuf import struct_pb2

from stagemesh.config import Pipeline
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import open_channel
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import stage_pb2_grpc as stage_rpc
from stagemesh_head.links.link import Link
from stagemesh_head.links.manager import LinkManager

ALLOWED_METHODS = frozenset(
    {
        "sleep",
        "wake_up",
        "reset_prefix_cache",
        "reset_mm_cache",
        "reset_encoder_cache",
        "pause",
        "resume",
        "add_lora",
        "remove_lora",
        "list_loras",
        "pin_lora",
        "start_profile",
        "stop_profile",
        "check_health",
    }
)
"""Control methods that a mesh runs unless its operator adds some; each engine knows those that it has."""


class StageCalls:
    """Runs a control method on every replica of some stages, side by side."""

    def __init__(
        self, links: LinkManager, extra_methods: Sequence[str] = (), pipelines: Sequence[Pipeline] = ()
    ) -> None:
        """Args: extra_methods: allowed on every stage; those of one stage are in its pipeline."""
        self._links = links
        self._allowed = ALLOWED_METHODS | set(extra_methods)
        self._of_stage = {
            (pipeline.name, stage.name): frozenset(stage.control_methods)
            for pipeline in pipelines
            for stage in pipeline.stages
        }

    async def call(
        self,
        pipeline: str,
        stages: Sequence[str],
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout_s: float,
    ) -> list[admin_pb.ReplicaCallResult]:
        """One result per linked replica, by stage (in the order given) and replica id.

        Args:
            args, kwargs: plain JSON values.
            timeout_s: for the whole call; a replica that did not answer by then gets a REQUEST_TIMEOUT of its own.

        Raises:
            MeshError: METHOD_NOT_ALLOWED.
        """
        allowed = self._allowed.union(*(self._of_stage.get((pipeline, stage), ()) for stage in stages))
        if method not in allowed:
            raise MeshError(
                Reason.METHOD_NOT_ALLOWED,
                f"method: {method!r}: not allowed; methods are {', '.join(sorted(allowed))}",
                method=method,
            )
        request = stage_pb.CallRequest(method=method)
        request.args.extend(args)
        request.kwargs.update(kwargs)
        links = sorted(
            (link for link in self._links.links() if link.key.pipeline == pipeline and link.key.stage in stages),
            key=lambda link: (stages.index(link.key.stage), link.key.replica_id),
        )
        return list(await asyncio.gather(*(self._one(link, request, timeout_s) for link in links)))

    async def _one(self, link: Link, request: stage_pb.CallRequest, timeout_s: float) -> admin_pb.ReplicaCallResult:
        answer = admin_pb.ReplicaCallResult(replica=link.key.ref(link.incarnation))
        # A connection of its own, so that a method that takes long blocks nothing.
        channel = open_channel(link.endpoint)
        try:
            response = await stage_rpc.StageServiceStub(channel).Call(request, timeout=timeout_s)
            answer.result.CopyFrom(response.result if response.HasField("result") else struct_pb2.Value(null_value=0))  # type: ignore[arg-type]
        except grpc.RpcError as error:
            answer.error.CopyFrom(MeshError.from_rpc_error(error).to_status())
        finally:
            await channel.close()
        return answer

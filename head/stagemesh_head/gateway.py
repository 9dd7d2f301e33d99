"""The part of a head that serves clients, built on any source of membership: the registry beside it, or a watch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc

from stagemesh.config import Pipeline
from stagemesh.telemetry.tracing import Tracer
from stagemesh.v1 import header_pb2 as header_pb
from stagemesh.v1 import inference_pb2_grpc as inference_rpc
from stagemesh_head.links.calls import StageCalls
from stagemesh_head.links.manager import LinkManager
from stagemesh_head.links.outputs import OutputRelay
from stagemesh_head.orchestration.catalogue import Catalogue
from stagemesh_head.orchestration.orchestrator import PROGRESS_TIMEOUT_S, Orchestrator
from stagemesh_head.orchestration.recovery import RecoveryLimits
from stagemesh_head.registry.rows import Membership
from stagemesh_head.routing.pools import Pools
from stagemesh_head.services.inference import InferenceServicer


class Gateway:
    """Pools, links, orchestrator and InferenceService, put together."""

    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        membership: Membership,
        header: Callable[[], header_pb.ResponseHeader],
        *,
        recovery: RecoveryLimits | None = None,
        call_methods: Sequence[str] = (),
        target: Callable[[str, str], int] | None = None,
        link_epoch: str = "",
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
        tracer: Tracer | None = None,
    ) -> None:
        """Args:
            call_methods: control methods that the operator allows beyond the usual ones.
            progress_timeout_s: a task that says nothing for so long fails its request.
            link_epoch: what replicas tell this process's links by; the head's epoch when empty.
            tracer: makes the spans of requests; None: nobody wants any.
            target: how many replicas a (pipeline, stage) should have; the pipeline file's number when None.

        Raises:
            ValueError: a pipeline names a policy that there is not, or default parameters that are wrong.
        """
        self.pools = Pools(pipelines)
        self.links = LinkManager(membership, link_epoch or header().head_epoch, self.pools.replica_changed)
        self.orchestrator = Orchestrator(
            pipelines, self.pools, recovery=recovery, progress_timeout_s=progress_timeout_s, tracer=tracer
        )
        self.calls = StageCalls(self.links, call_methods, pipelines)
        catalogue = Catalogue(pipelines, self.pools, target)
        self._servicer = InferenceServicer(self.orchestrator, OutputRelay(self.links), catalogue, header)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve InferenceService on `server`."""
        inference_rpc.add_InferenceServiceServicer_to_server(self._servicer, server)

    def start(self) -> None:
        """Follow the membership and open links."""
        self.links.start()
        self.orchestrator.start()

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and let those in flight finish; returns how many had to be stopped."""
        return await self.orchestrator.drain(timeout_s)

    async def stop(self) -> None:
        """Close all links."""
        await self.orchestrator.stop()
        await self.links.stop()

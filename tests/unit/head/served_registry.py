"""A registry on a port, and nodes that join it over a wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from registry_harness import World, pipeline, stage

from stagemesh.rpc.errors import MeshError
from stagemesh.rpc.options import open_channel
from stagemesh.rpc.server import bind, create_server
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import admin_pb2_grpc as admin_rpc
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import registry_pb2_grpc as registry_rpc
from stagemesh_head.registry.registry import Registry
from stagemesh_head.registry.rows import ReplicaKey, ReplicaState
from stagemesh_head.registry.settings import RegistrySettings
from stagemesh_head.services.admin import AdminServicer
from stagemesh_head.services.registry import RegistryServicer

DEADLINE_S = 10.0


class TwoEverywhere:
    """A head with no request to list, and two tasks on every replica."""

    def requests(self, pipeline: str) -> Iterable[admin_pb.RequestInfo]:
        return ()

    def inflight(self, key: ReplicaKey) -> int:
        return 2


class Recorder:
    """A caller that notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str], str, list[Any], dict[str, Any]]] = []

    async def call(
        self,
        pipeline: str,
        stages: Sequence[str],
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout_s: float,
    ) -> list[admin_pb.ReplicaCallResult]:
        self.calls.append((pipeline, list(stages), method, list(args), dict(kwargs)))
        return []


@dataclass
class Served:
    """A registry on a port."""

    registry: Registry
    caller: Recorder
    channel: grpc.aio.Channel

    @property
    def join(self) -> Any:
        return registry_rpc.RegistryServiceStub(self.channel).Join

    @property
    def watch(self) -> Any:
        return registry_rpc.RegistryServiceStub(self.channel).WatchReplicas

    @property
    def admin(self) -> Any:
        return admin_rpc.AdminServiceStub(self.channel)


@asynccontextmanager
async def serve(**settings: Any) -> AsyncIterator[Served]:
    registry = Registry(
        [pipeline(stage("writer", shared_devices=True), stage("painter", 2))], RegistrySettings(**settings)
    )
    caller = Recorder()
    server = create_server()
    registry_rpc.add_RegistryServiceServicer_to_server(RegistryServicer(registry), server)
    admin_rpc.add_AdminServiceServicer_to_server(AdminServicer(registry, TwoEverywhere(), caller), server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    registry.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield Served(registry, caller, channel)
    finally:
        await registry.close()
        await server.stop(1.0)


class RealNode:
    """A harness node whose messages cross a wire."""

    def __init__(self, served: Served, node_id: str, devices: int = 2, **hello: Any) -> None:
        self.served = served
        self.fake = World(*served.registry.pipelines).node(node_id, devices, **hello)
        self.call: Any = None

    async def join(self) -> RealNode:
        self.call = self.served.join(timeout=60)
        await self.send(hello=self.fake.hello_message())
        message = await self.read()
        assert message.HasField("welcome")
        return self

    async def send(self, **message: Any) -> None:
        await asyncio.wait_for(self.call.write(registry_pb.JoinRequest(**message)), DEADLINE_S)

    async def read(self) -> registry_pb.JoinResponse:
        message = await asyncio.wait_for(self.call.read(), DEADLINE_S)
        if message is grpc.aio.EOF:
            raise await self.error()
        self.fake.receive(message)
        return message

    async def error(self) -> MeshError:
        status, trailers = await self.call.code(), await self.call.trailing_metadata()
        return MeshError.from_rpc_error(
            grpc.aio.AioRpcError(status, await self.call.initial_metadata(), trailers, await self.call.details())
        )

    async def beat(self, state: ReplicaState) -> None:
        self.fake.set(state)
        self.fake.sequence += 1
        await self.send(
            heartbeat=registry_pb.Heartbeat(
                sequence=self.fake.sequence,
                incarnation=self.fake.incarnation,
                replicas=list(self.fake.running.values()),
            )
        )
        while not (await self.read()).HasField("heartbeat_ack"):
            pass

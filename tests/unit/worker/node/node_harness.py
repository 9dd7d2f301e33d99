"""A scripted head for tests of the node agent: a real gRPC server that the test speaks through."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from stagemesh.rpc.errors import MeshError
from stagemesh.rpc.server import bind, create_server
from stagemesh.v1 import device_pb2 as device_pb
from stagemesh.v1 import header_pb2 as header_pb
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import registry_pb2_grpc as registry_rpc
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh.wire import duration
from stagemesh_worker.node.lifecycle import LifeLimits, Place
from stagemesh_worker.node.locks import DeviceLocks
from stagemesh_worker.node.supervisor import Supervisor

PATIENCE_S = 20.0
SYNTHETIC = '{"name": "writer", "stage_type": "llm", "engine": "synthetic", "engine_args": %s, "runtime": %s}'


def assignment(
    replica_id: int = 0, *, engine_args: str = "{}", runtime: str = "{}", core: int = 0, start_timeout_s: float = 60.0
) -> registry_pb.Assignment:
    """A synthetic writer on one core."""
    return registry_pb.Assignment(
        replica=replica_pb.ReplicaRef(pipeline="test", stage="writer", replica_id=replica_id),
        pipeline_revision="r1",
        devices=[device_pb.Device(id=f"cpu:{core}", kind=device_pb.DEVICE_KIND_CPU, cores=[core])],
        stage_config_json=SYNTHETIC % (engine_args, runtime),
        start_timeout=duration(start_timeout_s),
    )


def revocation(replica_id: int = 0, *, grace_s: float = 0.0, incarnation: str = "") -> registry_pb.Revocation:
    ref = replica_pb.ReplicaRef(pipeline="test", stage="writer", replica_id=replica_id, incarnation=incarnation)
    return registry_pb.Revocation(replica=ref, grace=duration(grace_s), reason="the test says so")


def hello() -> registry_pb.Hello:
    return registry_pb.Hello(contract_version="1", software_version="0.1.0", node_id="n", incarnation="one")


async def eventually(probe: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """The first true result of `probe`."""
    async with asyncio.timeout(timeout_s):
        while not (found := probe()):  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.01)
        return found


@contextlib.asynccontextmanager
async def supervisor(folder: Path, limits: LifeLimits | None = None) -> AsyncIterator[tuple[Supervisor, list[str]]]:
    """A supervisor that lets time pass, and the lines its replicas print; nothing is left at the end."""
    lines: list[str] = []
    own = Supervisor(
        Place("127.0.0.1", "127.0.0.1", "host"),
        DeviceLocks(folder / "locks"),
        lambda stage, replica, line: lines.append(f"{stage}/{replica} {line}"),
        limits=limits or LifeLimits(),
    )
    time = asyncio.create_task(own.run())
    try:
        yield own, lines
    finally:
        time.cancel()
        await asyncio.gather(time, return_exceptions=True)
        await own.close()


class Call:
    """One Join call as the head sees it."""

    def __init__(self, context: Any) -> None:
        self.received: asyncio.Queue[registry_pb.JoinRequest | None] = asyncio.Queue()
        """None: the node ended its side."""
        self.answers_heartbeats = True
        self._context = context
        self._writing = asyncio.Lock()
        self._end: asyncio.Future[MeshError | None] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()

    async def next(self, kind: str = "") -> Any:
        """The next message, or the next of a kind."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.received.get()
                if message is None:
                    assert kind == "end", "the node ended the session"
                    return None
                if not kind or message.WhichOneof("message") == kind:
                    return getattr(message, message.WhichOneof("message"))

    async def welcome(self, *, interval_s: float = 0.2, lease_s: float = 2.0, epoch: str = "e1") -> registry_pb.Hello:
        """Take the Hello and answer it."""
        said: registry_pb.Hello = await self.next("hello")
        await self.send(
            welcome=registry_pb.Welcome(
                header=header_pb.ResponseHeader(head_epoch=epoch),
                heartbeat_interval=duration(interval_s),
                lease_duration=duration(lease_s),
            )
        )
        return said

    async def send(self, **message: Any) -> None:
        async with self._writing:  # gRPC takes one write at a time
            await self._context.write(registry_pb.JoinResponse(**message))

    def end(self, error: MeshError | None = None) -> None:
        """End the call."""
        if not self._end.done():
            self._end.set_result(error)

    async def serve(self, requests: AsyncIterator[registry_pb.JoinRequest]) -> None:
        reader = asyncio.create_task(self._read(requests))
        try:
            error = await self._end
            if error is not None:
                await error.abort(self._context)
        finally:
            self.over.set()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[registry_pb.JoinRequest]) -> None:
        async for message in requests:
            if message.HasField("heartbeat") and self.answers_heartbeats:
                await self.send(heartbeat_ack=registry_pb.HeartbeatAck(sequence=message.heartbeat.sequence))
            self.received.put_nowait(message)
        self.received.put_nowait(None)
        self.end()


class ScriptedHead(registry_rpc.RegistryServiceServicer):
    """Hands each Join call to the test."""

    def __init__(self) -> None:
        self.address = ""
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None

    async def Join(self, request_iterator: AsyncIterator[registry_pb.JoinRequest], context: Any) -> None:
        call = Call(context)
        self.calls.put_nowait(call)
        await call.serve(request_iterator)

    async def next_call(self) -> Call:
        async with asyncio.timeout(PATIENCE_S):
            return await self.calls.get()

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = create_server()
        registry_rpc.add_RegistryServiceServicer_to_server(self, self._server)
        port = bind(self._server, address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

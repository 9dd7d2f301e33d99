"""The replica's life on the event loop: start the engine, serve, prove it, report, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import Coroutine
from typing import Any

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.health import Health
from stagemesh.rpc.server import bind, create_server
from stagemesh.telemetry.tracing import make_tracer
from stagemesh.tensors import TensorResolver, TensorServicer, TensorStore
from stagemesh.v1 import stage_pb2_grpc as stage_grpc
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh_worker.adapters import AdapterRunner
from stagemesh_worker.engines.base import Engine, EngineConfigError
from stagemesh_worker.replica.calls import ControlCalls
from stagemesh_worker.replica.channel import ControlChannel
from stagemesh_worker.replica.control import Assign, Drain, Drained, Failed, Message, Ready, Stop
from stagemesh_worker.replica.identity import Identity
from stagemesh_worker.replica.keeper import Keeper
from stagemesh_worker.replica.links import Links
from stagemesh_worker.replica.probe import PROBE_REQUEST_ID, probe
from stagemesh_worker.replica.service import StageServicer
from stagemesh_worker.replica.tasks import TaskContext
from stagemesh_worker.replica.watchdog import Watchdog

log = logging.getLogger(__name__)

SERVICES = ("stagemesh.v1.StageService", "stagemesh.v1.TensorService")
STOP_GRACE_S = 0.5
ENGINE_STOP_S = 5.0


class ReplicaHost:
    """One engine behind one endpoint."""

    def __init__(self, assign: Assign, engine: Engine, adapters: AdapterRunner, channel: ControlChannel) -> None:
        self._assign = assign
        self._engine = engine
        self._adapters = adapters
        self._channel = channel
        self._stopping = asyncio.Event()
        self._failure: MeshError | None = None
        self._owned: set[asyncio.Task[None]] = set()
        self._store = TensorStore(
            host_id=assign.host_id,
            incarnation=assign.incarnation,
            inline_below_bytes=assign.tensor_threshold_bytes,
        )
        self._resolver = _Resolver(TensorResolver(host_id=assign.host_id))
        self._probe_epoch = f"self-probe-{secrets.token_hex(16)}"
        self._tracer = make_tracer(
            "replica", pipeline=assign.pipeline, stage=engine.stage.name, replica=assign.replica_id
        )
        context = TaskContext(engine, adapters, self._resolver, self._tracer)
        self._links = Links(context, Keeper(self._store), self._probe_epoch)
        self._identity = Identity(
            assign.pipeline, assign.pipeline_revision, engine.stage.name, assign.replica_id, assign.incarnation
        )

    async def run(self) -> MeshError | None:
        """Serve until told to stop, or until the engine can no longer; returns why it failed, if it did."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        await self._channel.open(self._on_message, self._stopping.set)
        server = None
        try:
            await self._until_stopping(self._engine.start(), Reason.START_FAILED)
            if not self._stopping.is_set():
                server = create_server()
                health = Health(server, SERVICES)
                await self._serve(server, health)
                await self._stopping.wait()
                await health.set_ready(False)
        finally:
            await self._end(server)
        return self._failure

    async def _serve(self, server: Any, health: Health) -> None:
        assign = self._assign
        stage_grpc.add_StageServiceServicer_to_server(
            StageServicer(self._identity, self._links, ControlCalls(self._engine)), server
        )
        TensorServicer(self._store).add_to_server(server)
        port = bind(server, f"{assign.listen_host}:0")
        endpoint = f"{assign.advertise_host}:{port}"
        self._store.endpoint = endpoint
        await server.start()
        await health.set_alive(True)
        self._own(self._watch_death())
        timeout_s = self._engine.stage.runtime.stage_init_timeout
        await self._until_stopping(
            probe(endpoint, self._identity, self._engine.probe_task(), self._probe_epoch, timeout_s),
            Reason.START_FAILED,
        )
        self._store.release_request(PROBE_REQUEST_ID)
        if self._stopping.is_set():
            return
        await health.set_ready(True)
        self._channel.send(Ready(endpoint))
        watchdog = Watchdog(self._engine, assign.progress_timeout_s, self._channel.send, self._links.report_load)
        self._own(self._guard(watchdog.run()))
        self._own(self._guard(self._store.expire_forever()))

    async def _until_stopping(self, work: Coroutine[Any, Any, None], reason: Reason) -> None:
        """Run a step of the start; an order to stop interrupts it, a failure stops the replica."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        except EngineConfigError as error:
            self._fail(MeshError(Reason.BAD_STAGE_CONFIG, f"stage {self._identity.stage!r}: {error}"))
        except Exception as error:
            self._fail(error if isinstance(error, MeshError) else MeshError(reason, f"{type(error).__name__}: {error}"))
        finally:
            for one in (task, stop):
                one.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _watch_death(self) -> None:
        why = await self._engine.died()
        error = MeshError(Reason.ENGINE_DEAD, why, stage=self._identity.stage)
        self._links.fail_all(error)
        await self._links.settle(2.0)
        self._fail(error)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """A helper that must not end by itself: its error stops the replica."""
        try:
            await work
        except Exception as error:
            log.error("%s", error, exc_info=not isinstance(error, MeshError))
            failure = MeshError.from_exception(error)
            self._links.fail_all(failure)
            await self._links.settle(2.0)
            self._fail(failure)

    def _fail(self, error: MeshError) -> None:
        if self._failure is None and not self._stopping.is_set():
            self._failure = error
        self._stopping.set()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Drain):
            self._own(self._drain(message.grace_s))
        elif isinstance(message, Stop):
            self._stopping.set()
        else:
            log.error("control socket: %s is not for a replica", type(message).__name__)

    async def _drain(self, grace_s: float) -> None:
        await self._links.drain(grace_s)
        self._channel.send(Drained())

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._owned.add(task)
        task.add_done_callback(self._owned.discard)

    async def _end(self, server: Any) -> None:
        """Reverse order of the start; every step is bounded."""
        if self._failure is not None:
            is_fatal = self._failure.reason is Reason.BAD_STAGE_CONFIG
            self._channel.send(Failed(self._failure.reason.value, self._failure.message, fatal=is_fatal))
        for task in [*self._owned]:
            task.cancel()
        await asyncio.gather(*self._owned, return_exceptions=True)
        if server is not None:
            await server.stop(STOP_GRACE_S)
        await self._links.settle(STOP_GRACE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENGINE_STOP_S):
                await self._engine.stop()
        await self._resolver.close()
        if self._tracer is not None:
            await self._tracer.close()
        self._store.close()
        self._adapters.close()
        await self._channel.close()


class _Resolver:
    """The tensor plane's resolver, for files too."""

    def __init__(self, tensors: TensorResolver) -> None:
        self._tensors = tensors
        self.resolve = tensors.resolve
        self.close = tensors.close

    async def resolve_bytes(self, ref: tensor_pb.TensorRef) -> bytes:
        """The bytes of a referenced file."""
        array = await self._tensors.resolve_ref(ref)
        return bytes(array.tobytes())

"""The composition root of a head: the only file that knows every room."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from stagemesh.config import Pipeline
from stagemesh.launch.ready_file import write_ready_file
from stagemesh.rpc.health import Health
from stagemesh.rpc.server import bind, create_server
from stagemesh.telemetry.tracing import make_tracer
from stagemesh.v1 import admin_pb2_grpc as admin_rpc
from stagemesh.v1 import registry_pb2_grpc as registry_rpc
from stagemesh_head.follower import Follower
from stagemesh_head.gateway import Gateway
from stagemesh_head.metrics.exporter import Exporter
from stagemesh_head.orchestration.recovery import RecoveryLimits
from stagemesh_head.processes import end_with_parent, gateway_command, nth_port
from stagemesh_head.registry.registry import Registry
from stagemesh_head.registry.settings import RegistrySettings
from stagemesh_head.registry.state import StageKey
from stagemesh_head.services.admin import AdminServicer
from stagemesh_head.services.registry import RegistryServicer

log = logging.getLogger(__name__)

CLIENT_SERVICES = ("stagemesh.v1.InferenceService", "stagemesh.v1.AdminService")
REGISTRY_SERVICES = ("stagemesh.v1.RegistryService",)
STOP_GRACE_S = 1.0
"""For answers on their way, once every request has its end."""
EXIT_WITHIN_S = 5.0
"""An interpreter that does not end by itself after that is ended."""


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """What an operator may set about a head."""

    listen: str = "127.0.0.1:8470"
    """host:port for clients, operators and nodes; port 0 picks one."""
    registry_listen: str | None = None
    """Another host:port for nodes; None: the same."""
    ready_file: Path | None = None
    """Gets one line, host:port of `listen`, once the head serves."""
    gateways: int = 0
    """Gateway processes to run beside the head; 0: it serves clients by itself only."""
    gateway_listen: str = "127.0.0.1:8480"
    """Where they listen, all on one port."""
    metrics_listen: str | None = None
    """host:port of a Prometheus endpoint, gateways' on the ports after it; None: no metrics."""
    drain_timeout_s: float = 30.0
    """Time that requests in flight have when the head is told to stop."""
    call_methods: tuple[str, ...] = ()
    """Control methods that operators may run on replicas beyond the usual ones."""
    registry: RegistrySettings = field(default_factory=RegistrySettings)
    recovery: RecoveryLimits = field(default_factory=RecoveryLimits)


class Head:
    """One head: a registry, a gateway, and the servers before them."""

    def __init__(self, pipelines: Sequence[Pipeline], settings: HeadSettings) -> None:
        """Raises ValueError when a pipeline has an unknown policy or wrong default parameters; TracingError."""
        self.settings = settings
        self._tracer = make_tracer("head")
        self.address = ""
        """host:port that clients use, once started."""
        self.registry = Registry(pipelines, settings.registry)
        self.gateway = Gateway(
            pipelines,
            self.registry,
            self.registry.header,
            recovery=settings.recovery,
            call_methods=settings.call_methods,
            tracer=self._tracer,
            target=lambda pipeline, stage: self.registry.machine.state.stages[StageKey(pipeline, stage)].target,
        )
        self._servers: list[tuple[grpc.aio.Server, Health]] = []
        self._exporter = (
            Exporter(pipelines, self.gateway, self.registry, self.registry) if settings.metrics_listen else None
        )
        self._gateways: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Begin to serve.

        Raises:
            SecurityError: an address wider than loopback without TLS.
            OSError: an address that cannot be bound.
        """
        self.registry.start()
        self.gateway.start()
        nodes_apart = self.settings.registry_listen is not None
        server = create_server()
        self.gateway.add_to(server)
        admin = AdminServicer(self.registry, self.gateway.orchestrator, self.gateway.calls)
        admin_rpc.add_AdminServiceServicer_to_server(admin, server)
        if not nodes_apart:
            registry_rpc.add_RegistryServiceServicer_to_server(RegistryServicer(self.registry), server)
        services = CLIENT_SERVICES if nodes_apart else CLIENT_SERVICES + REGISTRY_SERVICES
        self.address = registry_address = await self._serve(server, services, self.settings.listen)
        if self.settings.registry_listen is not None:
            server = create_server()
            registry_rpc.add_RegistryServiceServicer_to_server(RegistryServicer(self.registry), server)
            registry_address = await self._serve(server, REGISTRY_SERVICES, self.settings.registry_listen)
        if self._exporter is not None and self.settings.metrics_listen is not None:
            self._exporter.start(self.settings.metrics_listen)
        if self.settings.gateways:
            await self._start_gateways(registry_address)
        if self.settings.ready_file is not None:
            write_ready_file(self.settings.ready_file, self.address)

    async def _start_gateways(self, registry_address: str) -> None:
        settings = self.settings
        further = ["--processes", str(settings.gateways)]
        if settings.metrics_listen is not None:
            further += ["--metrics-listen", nth_port(settings.metrics_listen, 1)]
        command = gateway_command(registry_address, settings.gateway_listen, settings.drain_timeout_s, *further)
        self._gateways = await asyncio.create_subprocess_exec(*command, preexec_fn=end_with_parent)
        log.info("%d gateways serving on %s", settings.gateways, settings.gateway_listen)

    async def _serve(self, server: grpc.aio.Server, services: Sequence[str], address: str) -> str:
        health = Health(server, services)
        port = bind(server, address)
        await server.start()
        self._servers.append((server, health))
        await health.set_alive(True)
        await health.set_ready(True)
        serving = f"{address.rpartition(':')[0]}:{port}"
        log.info("serving %s on %s", ", ".join(name.rpartition(".")[2] for name in services), serving)
        return serving

    async def drain(self) -> None:
        """Say that it is not ready, refuse new requests, and let those in flight finish."""
        for _, health in self._servers:
            await health.set_ready(False)
        if self._gateways is not None and self._gateways.returncode is None:
            self._gateways.terminate()
        stopped = await self.gateway.drain(self.settings.drain_timeout_s)
        if stopped:
            log.warning("%d requests were still in flight and have been stopped", stopped)

    async def stop(self) -> None:
        """Stop serving, at once for what still runs."""
        if self._exporter is not None:
            self._exporter.close()
        if self._gateways is not None and self._gateways.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._gateways.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_WITHIN_S):
                    await self._gateways.wait()
        await self.registry.close()
        await self.gateway.stop()
        for server, _ in self._servers:
            await server.stop(STOP_GRACE_S)
        if self.settings.ready_file is not None:
            self.settings.ready_file.unlink(missing_ok=True)
        if self._tracer is not None:
            await self._tracer.close()


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """What an operator may set about a gateway."""

    head: str
    listen: str = "127.0.0.1:8480"
    ready_file: Path | None = None
    metrics_listen: str | None = None
    drain_timeout_s: float = 30.0
    shares_port: bool = False
    """Other processes listen on the same port; the kernel spreads connections over them."""
    recovery: RecoveryLimits = field(default_factory=RecoveryLimits)


class StandaloneGateway:
    """A gateway in a process of its own: it follows a head and serves clients, also while the head is away."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self._tracer = make_tracer("gateway")
        self._follower = Follower(settings.head)
        self._gateway: Gateway | None = None
        self._exporter: Exporter | None = None
        self._server: grpc.aio.Server | None = None
        self._health: Health | None = None

    async def start(self) -> None:
        """Follow the head, then serve. Raises as `Head.start`."""
        await self._follower.start()
        gateway = self._gateway = Gateway(
            self._follower.pipelines,
            self._follower,
            self._follower.header,
            recovery=self.settings.recovery,
            link_epoch=self._follower.epoch,
            tracer=self._tracer,
        )
        gateway.start()
        if self.settings.metrics_listen is not None:
            self._exporter = Exporter(self._follower.pipelines, gateway, self._follower)
            self._exporter.start(self.settings.metrics_listen)
        self._server = create_server(options=[("grpc.so_reuseport", int(self.settings.shares_port))])
        gateway.add_to(self._server)
        self._health = Health(self._server, CLIENT_SERVICES[:1])
        port = bind(self._server, self.settings.listen)
        await self._server.start()
        await self._health.set_alive(True)
        await self._health.set_ready(True)
        address = f"{self.settings.listen.rpartition(':')[0]}:{port}"
        log.info("gateway of %s serving on %s", self.settings.head, address)
        if self.settings.ready_file is not None:
            write_ready_file(self.settings.ready_file, address)

    async def drain(self) -> None:
        """As `Head.drain`."""
        if self._health is not None and self._gateway is not None:
            await self._health.set_ready(False)
            await self._gateway.drain(self.settings.drain_timeout_s)

    async def stop(self) -> None:
        """Stop serving, at once for what still runs."""
        if self._exporter is not None:
            self._exporter.close()
        await self._follower.stop()
        if self._gateway is not None:
            await self._gateway.stop()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        if self._tracer is not None:
            await self._tracer.close()


async def serve_gateway(settings: GatewaySettings) -> None:
    """Run a gateway until it is told to stop, as `serve` does a head."""
    await _run_until_told(StandaloneGateway(settings), settings.drain_timeout_s)


async def serve(pipelines: Sequence[Pipeline], settings: HeadSettings) -> None:
    """Run a head until it is told to stop: SIGTERM or SIGINT drain it, a second one stops it at once."""
    await _run_until_told(Head(pipelines, settings), settings.drain_timeout_s)


async def _run_until_told(process: Head | StandaloneGateway, drain_timeout_s: float) -> None:
    signals = asyncio.Queue[str]()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    told = asyncio.create_task(signals.get(), name="first signal")
    starting = asyncio.create_task(process.start(), name="start")
    try:
        # A gateway whose head has not come yet is still starting: it must heed a signal as well.
        await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            calm_garbage_collection()
            name = await told
            log.info("%s: draining for up to %g s; a second signal stops at once", name, drain_timeout_s)
            draining = asyncio.create_task(process.drain(), name="drain")
            second = asyncio.create_task(signals.get(), name="second signal")
            await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
            for task in (draining, second):
                task.cancel()
            await asyncio.gather(draining, second, return_exceptions=True)
    finally:
        for task in (starting, told):
            task.cancel()
        await asyncio.gather(starting, told, return_exceptions=True)
        await process.stop()


def calm_garbage_collection() -> None:
    """Leave what lives for ever out of every collection, and collect less often: a request is a few hundred objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` on the fastest loop there is, and see to it that the process ends after it."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    code = 1
    try:
        asyncio.run(main)
        code = 0
    finally:
        # grpc.aio may keep the interpreter from ending (grpc/grpc#40989).
        watchdog = threading.Timer(EXIT_WITHIN_S, os._exit, (code,))
        watchdog.daemon = True
        watchdog.start()

"""The node agent: puts inventory, session and supervisor together, and leaves in good order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stagemesh import __version__
from stagemesh.rpc.health import Health
from stagemesh.rpc.server import bind, create_server
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh_worker.node.inventory import discover, host_id
from stagemesh_worker.node.session import HeadSession
from stagemesh_worker.node.slot import ReplicaHost
from stagemesh_worker.node.supervisor import Supervisor

log = logging.getLogger("stagemesh.node")

CONTRACT_VERSION = "1"
HEALTH_PERIOD_S = 0.5
STAGE_SERVICE = "stagemesh.v1.StageService"


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What a node agent is told on its command line."""

    head: str
    stages: tuple[str, ...] = ()
    """Stages it is willing to run; empty: any."""
    pipeline: str = ""
    max_replicas: int = 0
    """0: as many as the devices hold."""
    node_id: str = ""
    devices: tuple[str, ...] = ()
    cores_per_device: int | None = None
    listen_host: str = "127.0.0.1"
    advertise_host: str = ""
    """Empty: found out."""
    health_listen: str = ""
    """host:port of a health service for probes; empty: none."""
    drain_timeout_s: float = 30.0
    give_up_after_s: float | None = None
    ready_file: Path | None = None
    labels: tuple[tuple[str, str], ...] = ()


class NodeAgent:
    """One node of the mesh."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._devices = discover(cores_per_device=settings.cores_per_device, only=settings.devices)
        self._host_id = host_id()
        self._node_id = settings.node_id or default_node_id()
        self._incarnation = secrets.token_hex(8)
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._why = ""
        self._grace_s = settings.drain_timeout_s

    async def run(self) -> None:
        """Serve until told to stop, then drain, say Goodbye and return.

        Raises:
            MeshError: the head was away for longer than allowed.
            OSError, SecurityError: the health port cannot be had.
        """
        settings = self._settings
        advertise = settings.advertise_host or default_advertise_host(settings.listen_host, settings.head)
        self._supervisor = Supervisor(ReplicaHost(settings.listen_host, advertise, self._host_id))
        self._supervisor.sweep()
        self._session = HeadSession(
            settings.head, self._hello, self._supervisor, self._drain_ordered, give_up_after_s=settings.give_up_after_s
        )
        offer = ", ".join(device.id for device in self._devices)
        log.info("node %s offers %s; replicas are reached at %s", self._node_id, offer, advertise)
        session = asyncio.create_task(self._session.run(), name="session")
        stopping = asyncio.create_task(self._stopping.wait(), name="stopping")
        announce = asyncio.create_task(self._announce(), name="announce")
        try:
            async with self._health():
                await asyncio.wait({session, stopping}, return_when=asyncio.FIRST_COMPLETED)
                await self._leave()
                if session.done():
                    session.result()
                async with asyncio.timeout(5.0):
                    await session
        finally:
            for task in (session, stopping, announce):
                task.cancel()
            await asyncio.gather(session, stopping, announce, return_exceptions=True)
            self._supervisor.sweep()

    def install_signal_handlers(self) -> None:
        """SIGTERM and SIGINT drain; a second one stops at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, f"{signal.Signals(number).name} received")

    def stop(self, reason: str) -> None:
        """Drain and leave; asked again, leave at once."""
        if self._stopping.is_set():
            log.info("%s again: stopping at once", reason)
            self._hurry.set()
            return
        log.info("%s: draining for up to %.0f s", reason, self._grace_s)
        self._why = reason
        self._stopping.set()

    def _drain_ordered(self, grace_s: float, reason: str) -> None:
        if not self._stopping.is_set():
            self._grace_s = grace_s
            self.stop(f"the head asked this node to leave ({reason or 'no reason given'})")

    async def _leave(self) -> None:
        self._session.draining = True
        self._supervisor.changed.set()
        drain = asyncio.create_task(self._supervisor.stop(self._grace_s))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not drain.done():
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)
            await self._supervisor.stop(0.0)
        await self._session.leave(self._why)

    def _hello(self) -> registry_pb.Hello:
        return registry_pb.Hello(
            contract_version=CONTRACT_VERSION,
            software_version=__version__,
            node_id=self._node_id,
            incarnation=self._incarnation,
            hostname=socket.gethostname(),
            devices=self._devices,
            pipeline=self._settings.pipeline,
            stages=self._settings.stages,
            max_replicas=self._settings.max_replicas,
            labels=dict(self._settings.labels),
            pid=os.getpid(),
            host_id=self._host_id,
        )

    async def _announce(self) -> None:
        """Write the ready file once the node has joined."""
        await self._session.joined.wait()
        path = self._settings.ready_file
        if path is not None:
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_text(self._node_id + "\n")
            os.replace(temporary, path)

    @contextlib.asynccontextmanager
    async def _health(self):  # type: ignore[no-untyped-def]
        """A health service for probes: alive unless a replica is wedged, ready when all replicas are."""
        if not self._settings.health_listen:
            yield
            return
        server = create_server()
        health = Health(server, [STAGE_SERVICE])
        bind(server, self._settings.health_listen)
        await server.start()
        task = asyncio.create_task(self._keep_health(health), name="health")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.stop(0)

    async def _keep_health(self, health: Health) -> None:
        while True:
            await health.set_ready(self._supervisor.is_ready and not self._stopping.is_set())
            await health.set_alive(not self._supervisor.wedged)
            await asyncio.sleep(HEALTH_PERIOD_S)


def default_node_id() -> str:
    """The host's name as a label: stable across restarts of the agent."""
    return re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:63] or "node"


def default_advertise_host(listen_host: str, head: str) -> str:
    """The address others reach this node's replicas at: where it listens, or the source of its route to the head."""
    if listen_host not in ("0.0.0.0", "::", "[::]"):
        return listen_host
    host, _, port = head.rpartition(":")
    for family, kind, proto, _, address in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, proto) as probe:
            probe.connect(address)  # sends nothing: it only asks for the route
            source: str = probe.getsockname()[0]
            return f"[{source}]" if ":" in source else source
    return socket.gethostname()


def parse_labels(pairs: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """`KEY=VALUE` words. Raises ValueError that names the word."""
    labels = []
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise ValueError(f"--label {pair!r}: want KEY=VALUE")
        labels.append((key, value))
    return tuple(labels)


__all__ = ["AgentSettings", "NodeAgent", "default_advertise_host", "default_node_id", "parse_labels"]

"""The node agent: offers its devices, runs what the head assigns, and leaves in good order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Coroutine
from typing import Any

from stagemesh import __version__
from stagemesh.launch.ready_file import write_ready_file
from stagemesh.names import CONTRACT_VERSION
from stagemesh.rpc.backoff import Backoff
from stagemesh.rpc.security import Security
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh_worker.node import identity
from stagemesh_worker.node.headlink import BACKOFF_S, MAX_BACKOFF_S, HeadLink
from stagemesh_worker.node.inventory import discover
from stagemesh_worker.node.lifecycle import Place
from stagemesh_worker.node.locks import DeviceLocks
from stagemesh_worker.node.probes import health_service
from stagemesh_worker.node.settings import AgentSettings
from stagemesh_worker.node.supervisor import OnLine, Supervisor

log = logging.getLogger(__name__)

QUIESCE_S = 1.0
"""For the head to learn that the node drains, before its replicas refuse tasks."""
END_S = 10.0
"""For the replicas to be gone over the drain's grace, and again when they are killed."""
FAREWELL_S = 5.0
"""For the last report and Goodbye to reach the head."""


class NodeAgent:
    """One node of the mesh."""

    def __init__(self, settings: AgentSettings, on_line: OnLine) -> None:
        """
        Args:
            on_line: gets stage, replica id and text of each line that a replica prints.

        Raises:
            IdentityError, InventoryError, SecurityError: a setting is wrong.
            OSError: the lock directory cannot be used.
        """
        identity.split_address(settings.head)
        Security.from_environment().check_bind(settings.listen_host)
        self._settings = settings
        self._on_line = on_line
        self._node_id = identity.check_node_id(settings.node_id or identity.default_node_id())
        self._devices = discover(cores_per_device=settings.cores_per_device, only=settings.devices)
        self._locks = DeviceLocks()
        self._host_id = identity.host_id()
        self._incarnation = secrets.token_hex(8)
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._reason = ""
        self._grace_s = settings.drain_timeout_s

    def stop(self, reason: str) -> None:
        """Drain and leave; asked again, leave at once."""
        if self._stopping.is_set():
            log.warning("%s again: stopping at once", reason)
            self._hurry.set()
            return
        log.info("%s: draining for up to %.0f s", reason, self._grace_s)
        self._reason = reason
        self._stopping.set()

    async def run(self) -> None:
        """Be a node until told to stop; then drain, say Goodbye and return. Nothing is left running, however it ends.

        Raises:
            MeshError: the head can never take this node, or was away for longer than allowed.
            IdentityError: its replicas could not be reached.
            OSError, SecurityError: the health service cannot be had.
        """
        offer = ", ".join(f"{device.id} ({device.name})" for device in self._devices)
        log.info("node %s offers %s", self._node_id, offer)
        async with contextlib.AsyncExitStack() as stack:
            place = await self._until_stopping(self._find_place())
            if place is None:
                return
            supervisor = Supervisor(place, self._locks, self._on_line)
            stack.push_async_callback(supervisor.close)
            if self._settings.health_listen:
                probes = health_service(
                    self._settings.health_listen, lambda: supervisor.is_ready and not self._stopping.is_set()
                )
                await stack.enter_async_context(probes)
            await self._live(supervisor)

    async def _live(self, supervisor: Supervisor) -> None:
        link = HeadLink(
            self._settings.head,
            self._hello,
            supervisor,
            self._ordered_to_leave,
            on_joined=self._mark_joined,
            give_up_after_s=self._settings.give_up_after_s,
        )
        linked = asyncio.create_task(link.run(), name="head link")
        helpers = [
            asyncio.create_task(supervisor.run(), name="supervisor"),
            asyncio.create_task(self._stopping.wait(), name="stopping"),
        ]
        try:
            await asyncio.wait([linked, *helpers], return_when=asyncio.FIRST_COMPLETED)
            if linked.done():
                # Its tasks' other ends are elsewhere: they are drained as on any other day.
                self.stop("the head is given up")
            # First the head sends no more tasks here, then the replicas take none: so none meets a closed door.
            supervisor.close_doors()
            await link.heard_out(QUIESCE_S)
            await self._drain(supervisor)
            await link.leave(self._reason)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await linked
            if helpers[0].done():
                helpers[0].result()
        finally:
            for task in (linked, *helpers):
                task.cancel()
            await asyncio.gather(linked, *helpers, return_exceptions=True)
            self._mark_joined(False)

    async def _drain(self, supervisor: Supervisor) -> None:
        """Until nothing runs here, and the head has had the time to learn it."""
        supervisor.drain(self._grace_s)
        if await self._unless_hurried(supervisor, self._grace_s + END_S):
            return
        supervisor.hurry()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await supervisor.empty.wait()

    async def _unless_hurried(self, supervisor: Supervisor, timeout_s: float) -> bool:
        """Wait until nothing runs here; False when time is up, or somebody is in a hurry."""
        waits = [asyncio.create_task(supervisor.empty.wait()), asyncio.create_task(self._hurry.wait())]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return waits[0].done()
        finally:
            for task in waits:
                task.cancel()

    async def _until_stopping(self, work: Coroutine[Any, Any, Place]) -> Place | None:
        """The result of `work`; None when told to stop first."""
        task = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for one in (task, stopping):
                one.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)

    async def _find_place(self) -> Place:
        """Where replicas are reached; waits for the head's name to resolve, which may come up after this node."""
        settings, backoff, said = self._settings, Backoff(BACKOFF_S, MAX_BACKOFF_S), ""
        while not (advertise := settings.advertise_host):
            try:
                advertise = await identity.find_advertise_host(settings.listen_host, settings.head)
                break
            except OSError as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("no session with the head at %s: %s", settings.head, said)
            await asyncio.sleep(backoff.next_s())
        log.info("replicas are reached at %s", advertise)
        return Place(settings.listen_host, advertise, self._host_id)

    def _ordered_to_leave(self, grace_s: float, reason: str) -> None:
        if not self._stopping.is_set():
            self._grace_s = grace_s
            self.stop(f"the head asks this node to leave ({reason or 'no reason given'})")

    def _hello(self) -> registry_pb.Hello:
        settings = self._settings
        return registry_pb.Hello(
            contract_version=CONTRACT_VERSION,
            software_version=__version__,
            node_id=self._node_id,
            incarnation=self._incarnation,
            hostname=socket.gethostname(),
            devices=self._devices,
            pipeline=settings.pipeline,
            stages=settings.stages,
            max_replicas=settings.max_replicas,
            labels=dict(settings.labels),
            pid=os.getpid(),
            host_id=self._host_id,
        )

    def _mark_joined(self, is_joined: bool) -> None:
        """Keep the ready file there while the node is joined."""
        path = self._settings.ready_file
        if path is None:
            return
        try:
            if is_joined:
                write_ready_file(path, self._node_id)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.error("--ready-file: %s: %s", path, error.strerror)

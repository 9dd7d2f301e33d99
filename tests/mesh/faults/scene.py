"""A mesh that is there to be hurt: a head, and two nodes with a replica each, the first of them behind a wire."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from stagemesh.client.admin import AdminClient
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from tests.mesh.faults.hostile import listens
from tests.mesh.faults.processes import Process, Processes, eventually, processes
from tests.mesh.faults.proxy import Proxy
from tests.mesh.faults.small_disk import SmallDisk
from tests.mesh.faults.wall_clock import WallClock

PIPELINE = """
name: sketch
stages:
- {name: writer, engine: synthetic, engine_args: {tokens: 20, tokens_per_second: 40}, runtime: {num_replicas: 2}}
"""
STAGE = "writer"


@dataclass(slots=True)
class Scene:
    """The mesh. Node `a` is on the wire, and its replica is the victim; `b` is the other one.

    What a fault needs is set before `start`.
    """

    mesh: Processes
    locks: Path
    head_arguments: list[str] = field(default_factory=list)
    a_arguments: list[str] = field(default_factory=list)
    replicas_at_first: int = 2
    ports: dict[str, str] = field(default_factory=dict)
    """What listens besides the head's own port and the replicas: name -> host:port."""
    clock: WallClock | None = None
    disk: SmallDisk | None = None
    held: ExitStack = field(default_factory=ExitStack)
    """What ends with the mesh."""
    blow: ExitStack = field(default_factory=ExitStack)
    """What ends with the fault, whatever came of it."""
    head: Process = field(init=False)
    a: Process = field(init=False)
    proxy: Proxy = field(init=False)
    _log_from: int = 0

    def start(self) -> None:
        """Start everything, and wait until the replicas are ready; `held` takes it down."""
        self.start_head()
        registry = self.ports.get("registry", self.mesh.address)
        self.proxy = self.held.enter_context(Proxy(registry))
        if self.replicas_at_first < 2:
            self.scale(self.replicas_at_first)
        self._start_node("b", registry, "cpu:1")
        if self.replicas_at_first < 2:
            self.mesh.ready(self.replicas_at_first)
        self.start_a()
        eventually("both nodes are live", self.has_both_nodes)
        for name, port in self.ports.items():
            eventually(f"{name} listens", partial(listens, port))
        self.mesh.ready(self.replicas_at_first)

    def start_head(self) -> None:
        """Start the head, or its successor."""
        self.head = self.mesh.start_head(*self.head_arguments)

    def start_a(self) -> None:
        """Start the first node, or its successor; what it logs from now on is `a_log`."""
        prefix = self.disk.prefix if self.disk is not None else ()
        self.a = self._start_node("a", self.proxy.address, "cpu:0", *self.a_arguments, prefix=prefix)
        self._log_from = 0

    def _start_node(
        self, name: str, registry: str, devices: str, *arguments: str, prefix: Sequence[str] = ()
    ) -> Process:
        return self.mesh.start(
            "stagemesh_worker", "--head", registry, "--node-id", name, "--devices", devices, *arguments, prefix=prefix
        )

    def scale(self, replicas: int) -> None:
        """Set how many replicas there should be."""
        with AdminClient(self.mesh.address) as admin:
            admin.scale_stage(STAGE, replicas)

    @property
    def victim(self) -> int:
        """Process id of the replica on the first node."""
        return next(row.report.pid for row in self.mesh.replicas() if row.node_id == "a")

    def replica_processes(self) -> dict[int, tuple[int, str]]:
        """Replica id -> process id and incarnation."""
        reports = [row.report for row in self.mesh.replicas()]
        return {report.replica.replica_id: (report.pid, report.replica.incarnation) for report in reports}

    @property
    def every_port(self) -> Mapping[str, str]:
        """Everything that listens, by what it is."""
        replicas = {f"replica {row.report.replica.replica_id}": row.report.endpoint for row in self.mesh.ready(2)}
        return {"head": self.mesh.address, **self.ports, **replicas}

    def has_both_nodes(self) -> bool:
        """Whether both are live, and no third one was."""
        states = [node.state for node in self.mesh.nodes().values() if node.state != admin_pb.NODE_STATE_GONE]
        return states == [admin_pb.NODE_STATE_LIVE] * 2

    def is_well(self) -> bool:
        """Whether both nodes are live and both replicas ready."""
        ready = [row for row in self.mesh.replicas() if row.state == replica_pb.REPLICA_STATE_READY]
        return self.has_both_nodes() and len(ready) == 2

    def mark_log(self) -> None:
        """What the first node says from now on is `a_log`."""
        self._log_from = len(self.a.lines)

    @property
    def a_log(self) -> list[str]:
        """Lines of the first node since it was marked."""
        return list(self.a.lines)[self._log_from :]


def free_address() -> str:
    """host:port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def scene(folder: Path) -> Iterator[Scene]:
    """A mesh, not yet started; nothing of it is left at the end."""
    with processes(folder, PIPELINE) as mesh:
        made = Scene(mesh, folder / "locks")
        mesh.environment["STAGEMESH_LOCK_DIR"] = str(made.locks)
        made.locks.mkdir()
        os.chmod(made.locks, 0o1777)
        with made.held:
            yield made

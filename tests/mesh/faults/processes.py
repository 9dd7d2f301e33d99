"""A mesh of real processes: `stagemesh head` and `stagemesh worker`, started, hurt and watched by a test."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from stagemesh import Client
from stagemesh.client.admin import AdminClient
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from tests.mesh.processes import END_S, POLL_S, READY_S, Process, eventually

__all__ = ["READY_S", "Process", "Processes", "eventually", "processes"]

MARK = "STAGEMESH_TEST_RUN"
"""Environment variable by which all processes of one mesh are found, however they were orphaned."""


class Processes:
    """The processes of one mesh."""

    def __init__(self, folder: Path, pipeline: Path) -> None:
        self.folder, self.pipeline = folder, pipeline
        self.run = uuid.uuid4().hex
        runtime = folder / "run"
        runtime.mkdir(mode=0o700, exist_ok=True)
        self.environment = {**os.environ, MARK: self.run, "XDG_RUNTIME_DIR": str(runtime), "PYTHONUNBUFFERED": "1"}
        self.address = "127.0.0.1:0"
        self._started: list[Process] = []

    def start_head(self, *arguments: str, wait: bool = True) -> Process:
        """Start the head; again at the same address after the first time."""
        ready = self.folder / f"head-{len(self._started)}"
        process = self.start(
            "stagemesh_head", str(self.pipeline), "--listen", self.address, "--ready-file", str(ready), *arguments
        )
        if wait:
            eventually("the head serves", lambda: ready.exists() or process.has_ended)
            assert ready.exists(), process.output
            self.address = ready.read_text().strip()
        return process

    def start_worker(self, node_id: str, *arguments: str) -> Process:
        return self.start("stagemesh_worker", "--head", self.address, "--node-id", node_id, *arguments)

    def start(self, module: str, *arguments: str, prefix: Sequence[str] = ()) -> Process:
        process = Process([module, *arguments], self.environment, prefix)
        self._started.append(process)
        return process

    @property
    def client(self) -> Client:
        return Client(self.address)

    # ------------------------------------------------------------------ what the head says

    def replicas(self, stage: str = "") -> list[registry_pb.ReplicaStatus]:
        with AdminClient(self.address) as admin:
            return admin.list_replicas(stage=stage)[0]

    def missing(self) -> list[admin_pb.MissingSlot]:
        with AdminClient(self.address) as admin:
            return admin.list_replicas()[1]

    def nodes(self) -> dict[str, admin_pb.NodeInfo]:
        with AdminClient(self.address) as admin:
            return {node.node_id: node for node in admin.list_nodes()}

    def ready(self, count: int, timeout: float = READY_S) -> list[registry_pb.ReplicaStatus]:
        """Wait until `count` replicas are READY, and return them."""

        def probe() -> list[registry_pb.ReplicaStatus] | None:
            found = [row for row in self.replicas() if row.state == replica_pb.REPLICA_STATE_READY]
            return found if len(found) == count else None

        try:
            found = eventually(f"{count} replicas are ready", probe, timeout)
        except AssertionError as error:
            output = "\n".join(process.output for process in self._started)
            raise AssertionError(f"{error}\n{output}") from None
        assert found is not None
        return found

    def state(self, stage: str, replica_id: int = 0) -> int:
        """State of one replica, 0 when there is none."""
        for row in self.replicas(stage):
            if row.report.replica.replica_id == replica_id:
                return row.state
        return 0

    # ------------------------------------------------------------------ what the system says

    def survivors(self) -> list[psutil.Process]:
        """All processes of this mesh that run, also orphans."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.run and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def litter(self) -> list[str]:
        """Sockets, run directories and shared-memory segments of dead processes of this mesh."""
        root = self.folder / "run"
        children = (path for path in root.glob("stagemesh-*/*") if path.name != "locks")
        return [str(path) for path in children]

    def close(self) -> None:
        for process in self._started:
            if not process.has_ended:
                with contextlib.suppress(ProcessLookupError):
                    process.signal(signal.SIGCONT)
                process.kill()
        deadline = time.monotonic() + END_S
        while (left := self.survivors()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        assert not left, f"outlived their node agent: {left}"


@contextlib.contextmanager
def processes(folder: Path, pipeline: str) -> Iterator[Processes]:
    """Processes for a pipeline given as YAML; at the end all are killed, and none may be left."""
    path = folder / "pipeline.yaml"
    path.write_text(pipeline)
    mesh = Processes(folder, path)
    try:
        yield mesh
    finally:
        mesh.close()

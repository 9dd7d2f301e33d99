"""What probes see of a worker: as a kubelet asks, with the health port and `stagemesh health`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh.cli.exits import UNAVAILABLE, UNREACHABLE
from stagemesh.v1 import replica_pb2 as replica_pb
from tests.mesh.faults.processes import Process, Processes, eventually, processes

pytestmark = pytest.mark.slow
STAGE = "stagemesh.v1.StageService"
PIPELINE = """
name: sketch
stages:
  - name: writer
    stage_type: llm
    engine: synthetic
    engine_args: {start_seconds: %g, tokens: 60, tokens_per_second: 20}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def health(address: str, service: str = "", timeout: float = 2) -> int:
    """Exit status of `stagemesh health`: 0 is healthy."""
    command = ["health", "--head", address, "--service", service, "--timeout", str(timeout)]
    done = subprocess.run(
        [sys.executable, "-m", "stagemesh.cli.main", *command], capture_output=True, text=True, timeout=30, check=False
    )
    return done.returncode


class Probed:
    """A mesh of one worker, and the worker's health port."""

    def __init__(self, mesh: Processes) -> None:
        self.mesh = mesh
        self.address = f"127.0.0.1:{free_port()}"
        mesh.start_head()
        self.worker: Process = mesh.start_worker("a", "--health-listen", self.address, "--drain-timeout", "20")

    @property
    def is_alive(self) -> bool:
        return health(self.address) == 0

    @property
    def is_ready(self) -> bool:
        return health(self.address, STAGE) == 0

    def wait_ready(self) -> replica_pb.ReplicaReport:
        report = self.mesh.ready(1)[0].report
        eventually("the node says so too", lambda: self.is_ready)
        return report


@pytest.fixture
def probed(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Probed]:
    """A worker whose engine takes the parameter's seconds to load."""
    with processes(tmp_path, PIPELINE % getattr(request, "param", 0)) as mesh:
        yield Probed(mesh)


@pytest.mark.parametrize("probed", [6.0], indirect=True)
def test_started_is_said_when_the_engine_is_loaded_and_not_before(probed: Probed) -> None:
    eventually("the health port answers", lambda: probed.is_alive)
    assert health(probed.address, STAGE) == UNAVAILABLE
    assert probed.mesh.state("writer") == replica_pb.REPLICA_STATE_STARTING, "it was asked while the engine loaded"
    probed.wait_ready()


def test_draining_worker_is_alive_and_not_ready(probed: Probed) -> None:
    probed.wait_ready()
    with probed.mesh.client as client:
        frames = client.generate("a wish", timeout=60)
        next(frames)
        probed.worker.signal(signal.SIGTERM)
        eventually("readiness ends", lambda: not probed.is_ready)
        assert probed.is_alive
        assert not probed.worker.has_ended, "it was asked while a request ran"
        assert list(frames), "the request ends in its own time"
    assert probed.worker.wait() == 0, probed.worker.output
    assert health(probed.address) == UNREACHABLE


def test_busy_worker_is_alive_and_ready(probed: Probed) -> None:
    report = probed.wait_ready()
    with probed.mesh.client as client:
        streams = [client.generate(f"wish {number}", timeout=60) for number in range(50)]
        for stream in streams:
            next(stream)
        assert probed.is_alive and probed.is_ready
        assert health(report.endpoint) == 0 and health(report.endpoint, STAGE) == 0, "the replica's own port"


def test_wedged_replica_makes_the_worker_not_ready_and_its_own_port_dead(probed: Probed) -> None:
    report = probed.wait_ready()
    os.kill(report.pid, signal.SIGSTOP)
    try:
        assert health(report.endpoint) == UNREACHABLE
        eventually("the worker is not ready", lambda: not probed.is_ready)
        assert probed.is_alive, "the node agent is what brings the replica back"
    finally:
        os.kill(report.pid, signal.SIGCONT)
    eventually("it is ready again", lambda: probed.is_ready)


def test_wedged_worker_is_not_alive(probed: Probed) -> None:
    probed.wait_ready()
    probed.worker.signal(signal.SIGSTOP)
    try:
        assert health(probed.address, timeout=1) == UNREACHABLE
    finally:
        probed.worker.signal(signal.SIGCONT)
    eventually("it is alive again", lambda: probed.is_alive)


def test_service_that_is_not_there_is_not_ready(probed: Probed) -> None:
    eventually("the health port answers", lambda: probed.is_alive)
    assert health(probed.address, "stagemesh.v1.NoSuchService") not in (0, UNREACHABLE)

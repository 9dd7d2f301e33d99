"""The head restarted twenty times beside real engines: they stay loaded, and every later request is served."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh import Image, TextDelta
from tests.mesh.faults.load import Load
from tests.mesh.faults.processes import READY_S, Processes, eventually

SHAPES = Path(__file__).resolve().parents[3] / "examples/shapes/pipeline.yaml"
REPLICAS = 2
RESTARTS = 20
LOADED_S = 200.0
FEW_STEPS = {"painter": {"num_inference_steps": 2}}
"""Restarts are what is looked at here, not pictures."""

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300), pytest.mark.slow]


def identities(mesh: Processes, timeout: float = READY_S) -> dict[tuple[str, int], tuple[int, str, int]]:
    """Of each replica: process, incarnation and restarts. The same afterwards: no model was loaded twice."""
    found = {}
    for row in mesh.ready(REPLICAS, timeout):
        replica = row.report.replica
        found[replica.stage, replica.replica_id] = (row.report.pid, replica.incarnation, row.report.restarts)
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: engines keep sockets below it, and a socket's path has 107 characters at most."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_head_restarted_twenty_times_under_load_loads_no_model_twice(folder: Path) -> None:
    mesh = Processes(folder, SHAPES)
    try:
        head = mesh.start_head()
        mesh.start_worker("a")
        before = identities(mesh, LOADED_S)
        with Load(mesh, threads=1, sampling=FEW_STEPS) as load:
            eventually("load runs", lambda: load.done > 0)
            for _ in range(RESTARTS):
                head.kill()
                head = mesh.start_head()
                assert identities(mesh) == before
                with mesh.client as client:
                    frames = list(client.generate("a small red star at night", sampling=FEW_STEPS, timeout=30))
                assert any(isinstance(frame, TextDelta) for frame in frames)
                assert any(isinstance(frame, Image) for frame in frames)
        assert identities(mesh) == before
        assert all("no head answers" in failure for failure in load.failures), load.failures
        print(f"{load.done} requests answered beside, {len(load.failures)} found no head")
    finally:
        mesh.close()

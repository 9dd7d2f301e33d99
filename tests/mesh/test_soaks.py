"""The soaks of benchmarks/soak.py, short: real processes, and nothing may be left of what was stopped or held back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh.client.aio import AsyncClient
from tests.mesh.faults.processes import Processes, processes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import soak_cancel
import soak_slow
from soak_leftovers import Census

TOKENS = 140


@pytest.fixture
def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Processes, Census]]:
    """A mesh of the pipeline that the test names, with one node."""
    text, replicas = request.param
    with processes(tmp_path, text) as mesh:
        head = mesh.start_head()
        mesh.start_worker("a")
        mesh.ready(replicas)
        yield mesh, Census(mesh, head.pid)


@pytest.mark.parametrize("mesh", [(soak_cancel.PIPELINE, soak_cancel.STAGES)], indirect=True)
async def test_requests_stopped_at_any_moment_leave_nothing_behind(mesh: tuple[Processes, Census]) -> None:
    race = soak_cancel.Race(*mesh, latest=1.3, rounds=400, at_once=16)
    assert await race.run() == []


@pytest.mark.parametrize("mesh", [(soak_slow.pipeline(TOKENS), 2)], indirect=True)
async def test_a_producer_does_not_run_ahead_of_a_consumer_ten_times_slower(mesh: tuple[Processes, Census]) -> None:
    async with AsyncClient(mesh[0].address) as client:
        assert await soak_slow.Slow(client, mesh[1], requests=8, tokens=TOKENS).run() == []

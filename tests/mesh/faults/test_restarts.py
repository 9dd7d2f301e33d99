"""Planned restarts under steady load: the head again and again, and every node in turn."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from stagemesh.client.admin import AdminClient
from tests.mesh.faults.load import Load, text_of
from tests.mesh.faults.processes import Processes, eventually, processes

PIPELINE = """
name: sketch
stages:
- name: writer
  engine: synthetic
  engine_args: {tokens: 10, tokens_per_second: 40}
  runtime: {num_replicas: 2}
"""
NODES = ("a", "b")


def identities(mesh: Processes) -> dict[int, tuple[int, str, int]]:
    """Of each replica: process, incarnation and restarts. The same afterwards: nothing was loaded twice."""
    return {
        row.report.replica.replica_id: (row.report.pid, row.report.replica.incarnation, row.report.restarts)
        for row in mesh.ready(2)
    }


@pytest.mark.parametrize("restarts", [5])
def test_head_killed_again_and_again_under_load_costs_no_reload_and_no_running_request(
    tmp_path: Path, restarts: int
) -> None:
    with processes(tmp_path, PIPELINE) as mesh:
        head = mesh.start_head()
        mesh.start_worker("a")
        before = identities(mesh)
        away: list[tuple[float, float]] = []
        with Load(mesh, threads=2) as load:
            for _ in range(restarts):
                seen = load.done
                eventually("load goes on", lambda seen=seen: load.done > seen + 2)
                killed = time.monotonic()
                head.kill()
                head = mesh.start_head()
                away.append((killed, time.monotonic()))
                assert identities(mesh) == before
                assert text_of(mesh), "a request that comes after the restart"
        assert identities(mesh) == before
        for failed in load.failed:
            assert "no head answers" in failed.error, "running requests are resumed"
            assert any(killed <= failed.ended and failed.started <= served for killed, served in away), failed
        resumed = [r for r in load.answered if any(r.started < killed < r.ended for killed, _ in away)]
        assert resumed, "none was running when the head was killed"


def test_a_scaled_stage_stays_scaled_when_the_head_is_restarted(tmp_path: Path) -> None:
    times = ("--heartbeat-interval", "0.5", "--heartbeat-timeout", "3")
    with processes(tmp_path, PIPELINE) as mesh:
        head = mesh.start_head(*times)
        mesh.start_worker("a")
        mesh.ready(2)
        with AdminClient(mesh.address) as admin:
            admin.scale_stage("writer", 1)
        eventually("one is left, and the node has heard of it", lambda: len(mesh.replicas()) == 1)
        [before] = mesh.ready(1)
        head.kill()
        mesh.start_head(*times)
        settled = time.monotonic() + 5
        [after] = mesh.ready(1)
        eventually("the time is over in which it waits for nodes", lambda: time.monotonic() > settled)
        assert [row.report.pid for row in mesh.ready(1)] == [after.report.pid] == [before.report.pid]
        assert mesh.missing() == []


def test_every_node_restarted_in_turn_under_load_fails_no_request(tmp_path: Path) -> None:
    with processes(tmp_path, PIPELINE) as mesh:
        mesh.start_head()
        workers = {name: mesh.start_worker(name, "--devices", f"cpu:{i}") for i, name in enumerate(NODES)}
        before = identities(mesh)
        with Load(mesh) as load:
            for index, name in enumerate(NODES):
                seen = load.done
                eventually("load goes on", lambda seen=seen: load.done > seen + 2)
                with AdminClient(mesh.address) as admin:
                    admin.drain_node(name, grace_s=20, reason="upgrade")
                eventually("it has nothing to do", lambda name=name: not runs(mesh, name), 30)
                workers[name].signal(signal.SIGTERM)
                assert workers[name].wait() == 0, workers[name].output
                workers[name] = mesh.start_worker(name, "--devices", f"cpu:{index}")
                after = identities(mesh)
        assert load.failures == []
        assert {pid for pid, _, _ in after.values()}.isdisjoint({pid for pid, _, _ in before.values()})
        assert sorted(after) == sorted(before), "the same slots"


def runs(mesh: Processes, node: str) -> bool:
    return any(row.node_id == node for row in mesh.replicas())

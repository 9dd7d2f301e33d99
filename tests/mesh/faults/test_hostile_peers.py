"""Peers that mean harm or speak something else, on every port of the mesh, under load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.mesh.faults import hostile
from tests.mesh.faults.load import Load, text_of
from tests.mesh.faults.processes import Processes, eventually, processes

PIPELINE = """
name: sketch
stages:
- {name: writer, engine: synthetic, engine_args: {tokens: 20, tokens_per_second: 40}, runtime: {num_replicas: 2}}
"""
GENERATE = "/stagemesh.v1.InferenceService/Generate"
JOIN = "/stagemesh.v1.RegistryService/Join"
EXECUTE = "/stagemesh.v1.StageService/Execute"
REFUSED = {
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Processes]:
    with processes(tmp_path, PIPELINE) as mesh:
        mesh.start_head()
        mesh.start_worker("a")
        mesh.ready(2)
        yield mesh


def pids(mesh: Processes) -> dict[int, int]:
    """Replica ids and process ids: what must not change."""
    return {row.report.replica.replica_id: row.report.pid for row in mesh.ready(2)}


def ports(mesh: Processes) -> list[str]:
    return [mesh.address, *(row.report.endpoint for row in mesh.ready(2))]


def test_nonsense_on_every_port_ends_its_own_connection_only(mesh: Processes) -> None:
    before = pids(mesh)
    with Load(mesh) as load:
        for port in ports(mesh):
            assert hostile.garbage(port) > 0
        seen = load.done
        eventually("load goes on", lambda: load.done > seen + 3)
    assert load.failures == []
    assert pids(mesh) == before


def test_oversized_and_malformed_messages_on_every_port_are_refused(mesh: Processes) -> None:
    before = pids(mesh)
    head, *replicas = ports(mesh)
    with Load(mesh) as load:
        for port, method in [(head, GENERATE), (head, JOIN), *((replica, EXECUTE) for replica in replicas)]:
            assert hostile.oversized(port, method) == grpc.StatusCode.RESOURCE_EXHAUSTED, method
            assert hostile.call(port, method, b"\xff" * 100) in REFUSED, method
        seen = load.done
        eventually("load goes on", lambda: load.done > seen + 3)
    assert load.failures == []
    assert pids(mesh) == before


def test_five_hundred_silent_connections_leave_room_for_clients(mesh: Processes) -> None:
    before = pids(mesh)
    with hostile.silent(ports(mesh), 500), Load(mesh) as load:
        eventually("requests are answered beside them", lambda: load.done > 10)
    assert load.failures == []
    assert pids(mesh) == before
    assert text_of(mesh)

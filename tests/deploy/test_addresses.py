"""IPv6, and proxies in the environment: what must not come between the parts of a mesh."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh import Client, TextDelta
from tests.mesh.faults.processes import Processes, processes

PIPELINE = """
name: sketch
stages:
  - name: writer
    stage_type: llm
    engine: synthetic
    engine_args: {tokens: 10}
"""
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Processes]:
    with processes(tmp_path, PIPELINE) as made:
        yield made


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def words(address: str) -> int:
    with Client(address) as client:
        frames = client.generate("a wish", timeout=30)
        return len("".join(frame.text for frame in frames if isinstance(frame, TextDelta)).split())


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_mesh_runs_on_ipv6(mesh: Processes, host: str) -> None:
    mesh.address = "[::1]:0"
    mesh.start_head()
    assert mesh.address.startswith("[::1]:")
    mesh.start_worker("a", "--listen-host", host)
    (row,) = mesh.ready(1)
    assert row.report.endpoint.startswith("[::1]:")
    assert words(mesh.address) == 10


def test_proxies_in_the_environment_are_not_used_between_the_parts(
    mesh: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        for name in PROXIES:
            monkeypatch.setenv(name, address)
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        mesh.environment |= dict.fromkeys(PROXIES, address)
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            mesh.environment.pop(name, None)
        mesh.start_head()
        mesh.start_worker("a")
        mesh.ready(1)
        assert words(mesh.address) == 10
        with pytest.raises(BlockingIOError):
            proxy.accept()

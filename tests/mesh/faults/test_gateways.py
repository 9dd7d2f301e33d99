"""Gateways: several processes on one port, serving on while the head is killed and comes back."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

from stagemesh import Client, TextDelta
from tests.mesh.faults.processes import eventually, processes
from tests.mesh.metrics_reader import Scrape, free_address

PIPELINE = """
name: sketch
stages:
- {name: writer, engine: synthetic, engine_args: {tokens: 20}, runtime: {num_replicas: 2}}
"""


def test_gateways_share_a_port_and_outlive_a_restart_of_the_head(tmp_path: Path) -> None:
    with processes(tmp_path, PIPELINE) as mesh:
        head = mesh.start_head()
        mesh.start_worker("a")
        mesh.ready(2)
        ready, metrics = tmp_path / "gateway", free_address(ports=2)
        host, port = metrics.split(":")
        gateway = mesh.start(
            "stagemesh.cli.main", "gateway", "--head", mesh.address, "--listen", "127.0.0.1:0", "--processes", "2",
            "--ready-file", str(ready), "--metrics-listen", metrics,
        )  # fmt: skip
        eventually("the gateway serves", lambda: ready.exists() or gateway.has_ended)
        assert ready.exists(), gateway.output
        eventually("both processes serve", lambda: gateway.output.count("serving on") == 2)
        address = ready.read_text().strip()

        def ask(count: int = 6) -> set[str]:
            """Requests over connections of their own, which the kernel spreads over the processes."""
            texts = set()
            for _ in range(count):
                with Client(address) as client:
                    frames = client.generate("a wish", timeout=20)
                    texts.add("".join(frame.text for frame in frames if isinstance(frame, TextDelta)))
            return texts

        expected = ask()
        assert len(expected) == 1 and expected != {""}
        head.kill()
        assert ask() == expected, "the last view is enough"
        mesh.start_head()
        assert ask() == expected, "a head that knows nothing yet takes nothing away"
        mesh.ready(2)
        assert ask() == expected
        scrapes = [Scrape(metrics), Scrape(f"{host}:{int(port) + 1}")]
        assert sum(scrape.value("requests_total", outcome="complete") for scrape in scrapes) == 24
        assert all(scrape.value("stage_ready_replicas", stage="writer") == 2 for scrape in scrapes)
        assert not any(scrape.rows("nodes") for scrape in scrapes), "only a head knows nodes"
        gateway.signal(15)
        assert gateway.wait() == 0, gateway.output


def test_head_runs_gateways_beside_it_and_takes_them_along(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with processes(tmp_path, PIPELINE) as mesh:
        head = mesh.start_head("--gateways", "2", "--gateway-listen", address, "--metrics-listen", "127.0.0.1:0")
        worker = mesh.start_worker("a")
        mesh.ready(2)

        def served() -> str:
            with Client(address, max_retries=0) as client:
                frames = client.generate("a wish", timeout=10)
                return "".join(frame.text for frame in frames if isinstance(frame, TextDelta))

        assert eventually("a gateway serves", served)
        told = eventually("all tell where their metrics are", lambda: _three(head.output))
        scrapes = [Scrape(f"127.0.0.1:{port}") for port in told]
        assert sum(scrape.value("requests_total", outcome="complete") for scrape in scrapes) == 1
        assert [scrape.value("nodes") for scrape in scrapes].count(1) == 1, "that is the head"
        head.signal(signal.SIGTERM)
        assert head.wait() == 0
        worker.signal(signal.SIGTERM)
        worker.wait()
        eventually("the gateways are gone", lambda: not mesh.survivors(), 15)


def _three(output: str) -> list[str]:
    ports = re.findall(r"serving metrics on 127.0.0.1:(\d+)", output)
    return ports if len(ports) == 3 else []


def test_gateway_heeds_a_signal_while_it_waits_for_its_head(tmp_path: Path) -> None:
    with processes(tmp_path, PIPELINE) as mesh:
        gateway = mesh.start(
            "stagemesh.cli.main", "gateway", "--head", "127.0.0.1:1", "--listen", "127.0.0.1:0"
        )
        eventually("it says that there is no head", lambda: "no view of the head" in gateway.output)
        gateway.signal(15)
        assert gateway.wait() == 0, gateway.output

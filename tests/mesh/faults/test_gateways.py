"""Gateways: several processes on one port, serving on while the head is killed and comes back."""

from __future__ import annotations

from pathlib import Path

from stagemesh import Client, TextDelta
from tests.mesh.faults.processes import eventually, processes

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
        ready = tmp_path / "gateway"
        gateway = mesh.start(
            "stagemesh.cli.main", "gateway", "--head", mesh.address, "--listen", "127.0.0.1:0", "--processes", "2",
            "--ready-file", str(ready),
        )  # fmt: skip
        eventually("the gateway serves", lambda: ready.exists() or gateway.has_ended)
        assert ready.exists(), gateway.output
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
        gateway.signal(15)
        assert gateway.wait() == 0, gateway.output


def test_gateway_heeds_a_signal_while_it_waits_for_its_head(tmp_path: Path) -> None:
    with processes(tmp_path, PIPELINE) as mesh:
        gateway = mesh.start(
            "stagemesh.cli.main", "gateway", "--head", "127.0.0.1:1", "--listen", "127.0.0.1:0"
        )
        eventually("it says that there is no head", lambda: "no view of the head" in gateway.output)
        gateway.signal(15)
        assert gateway.wait() == 0, gateway.output

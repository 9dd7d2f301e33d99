"""`stagemesh worker` as a process: what it refuses, how light it is, how it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from node_harness import ScriptedHead, assignment, eventually

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb

READY = replica_pb.REPLICA_STATE_READY
SERVING = health_pb2.HealthCheckResponse.SERVING


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "stagemesh_worker", *arguments]


def refused(*arguments: str) -> str:
    """What it prints, in one line, when it ends at once."""
    environment = {**os.environ, "COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}
    ended = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    return " ".join(ended.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--devices", "tpu:9"), "'tpu:9' is not on this node; it has "),
        (("--cores-per-device", "4096"), "--cores-per-device 4096: this node has"),
        (("--node-id", "No_Label"), "--node-id 'No_Label': want 1 to 63 of a-z"),
        (("--head", "nonsense"), "--head 'nonsense': want HOST:PORT"),
        (("--label", "x"), "--label 'x': want KEY=VALUE"),
        (("--listen-host", "0.0.0.0"), "refusing to listen on 0.0.0.0 without TLS"),
        (("--log-level", "loud"), "want debug, info, warning or error"),
        (("--replicas", "-1"), "--replicas"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused(*arguments)


def test_the_agent_is_light() -> None:
    code = (
        "import sys, psutil\n"
        "import stagemesh_worker.cli, stagemesh_worker.app\n"
        "print(psutil.Process().memory_info().rss)\n"
        "print(*sorted(set(sys.modules) & {'torch', 'vllm', 'diffusers', 'transformers', 'pydantic', 'omegaconf'}))"
    )
    rss, heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split("\n")[:2]
    assert heavy == ""
    assert int(rss) < 100 << 20


class Worker:
    """A node agent's process and what it printed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        runtime = folder / "run"
        runtime.mkdir(mode=0o700, exist_ok=True)
        self.output = folder / "worker.log"
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                command(*arguments),
                stdout=stream,
                stderr=stream,
                env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(folder)},
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    async def ends(self) -> int:
        async with asyncio.timeout(30):
            return await asyncio.to_thread(self.process.wait)

    def close(self) -> None:
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait(10)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


@pytest.fixture
async def head() -> AsyncIterator[ScriptedHead]:
    scripted = ScriptedHead()
    await scripted.start()
    yield scripted
    await scripted.stop()


async def test_it_is_joined_while_its_ready_file_is_there_and_leaves_in_order(
    head: ScriptedHead, tmp_path: Path
) -> None:
    ready_file = tmp_path / "ready"
    worker = Worker(
        tmp_path, "--head", head.address, "--node-id", "n7", "--stage", "writer", "--stage", "painter",
        "--replicas", "2", "--label", "zone=a", "--devices", "cpu:0", "--ready-file", str(ready_file),
    )  # fmt: skip
    try:
        call = await head.next_call()
        said = await call.welcome()
        assert (said.node_id, list(said.stages), said.max_replicas) == ("n7", ["writer", "painter"], 2)
        assert dict(said.labels) == {"zone": "a"}
        assert [device.id for device in said.devices] == ["cpu:0"]
        assert (said.pid, len(said.host_id), said.contract_version) == (worker.process.pid, 16, "1")
        await eventually(ready_file.exists)
        assert ready_file.read_text() == "n7\n"
        await call.send(assignment=assignment())
        await eventually(lambda: "READY at 127.0.0.1:" in worker.text)
        worker.process.send_signal(signal.SIGTERM)
        while not (beat := await call.next("heartbeat")).draining:
            pass
        assert [report.state for report in beat.replicas] == [READY], "the head knows before the replica drains"
        assert (await call.next("goodbye")).reason == "SIGTERM"
        assert await worker.ends() == 0
        assert not ready_file.exists()
        assert [path for path in (tmp_path / "run").rglob("*") if path.is_file() or path.is_socket()] == []
    finally:
        worker.close()


async def test_the_head_may_send_it_away(head: ScriptedHead, tmp_path: Path) -> None:
    worker = Worker(tmp_path, "--head", head.address, "--node-id", "n7", "--log-json")
    try:
        call = await head.next_call()
        await call.welcome()
        await call.send(assignment=assignment())
        await eventually(lambda: "READY at 127.0.0.1:" in worker.text)
        await call.send(drain=registry_pb.DrainOrder(reason="maintenance"))
        assert "maintenance" in (await call.next("goodbye")).reason
        assert await worker.ends() == 0
        records = [json.loads(line) for line in worker.text.splitlines()]
        assert {record["component"] for record in records} >= {"node"}
        assert all(record["stage"] == "writer" for record in records if record["component"] == "replica")
    finally:
        worker.close()


async def test_a_killed_agent_takes_its_replicas_with_it(head: ScriptedHead, tmp_path: Path) -> None:
    worker = Worker(tmp_path, "--head", head.address, "--node-id", "n7")
    try:
        call = await head.next_call()
        await call.welcome()
        await call.send(assignment=assignment())
        await eventually(lambda: "READY at 127.0.0.1:" in worker.text)
        replicas = psutil.Process(worker.process.pid).children(recursive=True)
        assert replicas
        worker.process.kill()
        worker.process.wait(10)
        await eventually(lambda: not [one for one in replicas if one.is_running()])
    finally:
        worker.close()


async def test_probes_see_it_alive_at_once_and_ready_with_its_replicas(head: ScriptedHead, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    worker = Worker(tmp_path, "--head", head.address, "--node-id", "n7", "--health-listen", address)
    try:
        call = await head.next_call()
        await call.welcome()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            alive = await stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=10, wait_for_ready=True)
            assert alive.status == SERVING
            async with asyncio.timeout(30):
                seen = []
                async for answer in stub.Watch(health_pb2.HealthCheckRequest(service="stagemesh.v1.StageService")):
                    seen.append(answer.status)
                    if answer.status == SERVING:
                        break
                    if len(seen) == 1:
                        await call.send(assignment=assignment())
            assert len(seen) > 1, "it was not ready before its replica was"
    finally:
        worker.close()


async def test_a_version_that_does_not_fit_ends_it_with_the_heads_words(head: ScriptedHead, tmp_path: Path) -> None:
    worker = Worker(tmp_path, "--head", head.address, "--node-id", "n7")
    try:
        call = await head.next_call()
        await call.next("hello")
        call.end(MeshError(Reason.VERSION_MISMATCH, "node 'n7' runs StageMesh 0.1.0, this head 3.0.0"))
        assert await worker.ends() not in (0, 1)
        assert "this head 3.0.0" in worker.text
        assert "Traceback" not in worker.text
    finally:
        worker.close()

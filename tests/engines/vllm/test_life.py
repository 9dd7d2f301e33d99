"""A vLLM replica's life: cores, memory, the death and the stall of its EngineCore, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from replica_harness import Replica, StartReplica

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh_worker.replica import control

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

START_S = 240.0
LONG = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}


def _core(replica: Replica) -> psutil.Process:
    children = psutil.Process(replica.process.pid).children(recursive=True)
    return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))


async def _start(start_replica: StartReplica, model: Path, **assign: object) -> Replica:
    arguments = {"max_model_len": 256, "max_num_seqs": 8}
    replica = await start_replica(assign, engine="vllm", model=str(model), engine_args=arguments)
    return await replica.ready(START_S)


async def _gone(process: psutil.Process) -> None:
    async with asyncio.timeout(10):
        await asyncio.to_thread(psutil.wait_procs, [process], 9)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def test_it_runs_on_its_cores_and_leaves_nothing_when_stopped(
    start_replica: StartReplica, tiny_llama: Path
) -> None:
    replica = await _start(start_replica, tiny_llama)
    core = _core(replica)
    for process in (replica.process.pid, core.pid):
        for status in Path(f"/proc/{process}/task").glob("*/status"):
            assert "Cpus_allowed_list:\t0\n" in status.read_text()
    assert core.memory_info().rss < 1 << 30
    sockets = list(Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")).glob(f"stagemesh-*/{replica.process.pid}-*"))
    assert sockets
    await replica.tell(control.Stop())
    assert await replica.exit_code() == 0
    await _gone(core)
    assert not any(entry.exists() for entry in sockets)


async def test_killed_core_fails_its_tasks_and_ends_the_replica(start_replica: StartReplica, tiny_llama: Path) -> None:
    replica = await _start(start_replica, tiny_llama)
    link = await replica.link()
    await link.submit(1, "a red circle", llm=LONG)
    await link.until(lambda link: bool(link.token_ids(1)))
    _core(replica).kill()
    event = await link.end_of(1)
    assert MeshError.from_status(event.failed).reason == Reason.ENGINE_DEAD
    failed = await replica.until(control.Failed)
    assert (failed.reason, failed.fatal) == ("ENGINE_DEAD", False)
    assert "exited with code -9" in failed.message
    assert await replica.exit_code() == control.EXIT_FAILED
    await link.close()


async def test_killed_replica_takes_its_core_along(start_replica: StartReplica, tiny_llama: Path) -> None:
    replica = await _start(start_replica, tiny_llama)
    core = _core(replica)
    os.kill(replica.process.pid, signal.SIGKILL)  # the replica alone, not its group
    await replica.exit_code()
    await _gone(core)


async def test_stopped_core_is_unhealthy_and_healthy_again_when_it_goes_on(
    start_replica: StartReplica, tiny_llama: Path
) -> None:
    replica = await _start(start_replica, tiny_llama, progress_timeout_s=2.0)
    link = await replica.link()
    await link.submit(1, "a red circle", llm=LONG)
    await link.until(lambda link: bool(link.token_ids(1)))
    core = _core(replica)
    core.suspend()
    try:
        assert "EngineCore" in (await replica.until(control.Unhealthy)).reason
    finally:
        core.resume()
    await replica.until(control.Healthy)
    assert (await link.end_of(1)).HasField("finished")
    await link.close()
    await replica.tell(control.Stop())
    assert await replica.exit_code() == 0

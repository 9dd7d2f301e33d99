"""How a diffusion engine ends, and how it fails to start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engine_harness import DEVICES, Sink, Tiny, alive, make, make_stage

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh_worker.engines.base import EngineConfigError
from stagemesh_worker.engines.diffusion.engine import DiffusionEngine

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]
pytest.importorskip("diffusers")


async def test_a_killed_child_fails_its_requests_and_says_why(tiny: Tiny) -> None:
    engine = DiffusionEngine(make_stage(tiny("image")), DEVICES)
    await engine.start()
    began = asyncio.Event()
    running = asyncio.create_task(make(engine, sink=Sink(lambda step: began.set()), num_inference_steps=500))
    waiting = asyncio.create_task(make(engine))
    died = asyncio.create_task(engine.died())
    await asyncio.wait_for(began.wait(), 30)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    why = await asyncio.wait_for(died, 10)
    assert "SIGKILL" in why
    assert "loaded " in why  # its last lines
    for broken in (running, waiting):
        with pytest.raises(MeshError) as caught:
            await broken
        assert caught.value.reason is Reason.ENGINE_DEAD
    with pytest.raises(MeshError) as caught:
        await make(engine)
    assert caught.value.reason is Reason.ENGINE_DEAD
    await engine.stop()


async def test_a_frozen_child_is_found_by_its_missing_steps(tiny: Tiny) -> None:
    engine = DiffusionEngine(make_stage(tiny("image")), DEVICES)
    await engine.start()
    began = asyncio.Event()
    running = asyncio.create_task(make(engine, sink=Sink(lambda step: began.set()), num_inference_steps=500))
    await asyncio.wait_for(began.wait(), 30)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        with pytest.raises(MeshError, match=r"no step ended within 0\.5 s") as caught:
            await engine.check_progress(0.5)
        assert caught.value.reason is Reason.ENGINE_STUCK
        assert engine.load().since_progress_s > 0.3
        pid = engine.pid
    finally:
        await engine.stop()  # a stopped process is ended too
    with pytest.raises(MeshError):
        await running
    assert not alive(pid)


PARENT = """
import asyncio, sys
from stagemesh.config import Stage
from stagemesh_worker.engines.base import DeviceSet
from stagemesh_worker.engines.diffusion.engine import DiffusionEngine

async def main():
    stage = Stage(stage_id=0, name="painter", stage_type="diffusion", model=sys.argv[1])
    engine = DiffusionEngine(stage, DeviceSet(ids=("cpu:0",)))
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_the_child_never_outlives_its_engine(tiny: Tiny) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tiny("image")), stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 90))
    assert alive(pid)
    handle = os.pidfd_open(pid)
    parent.kill()
    await parent.wait()
    ended = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_reader(handle, lambda: ended.done() or ended.set_result(None))
    try:
        await asyncio.wait_for(ended, 10)
    finally:
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)


# ------------------------------------------------------------------ a start that fails
async def test_a_folder_without_a_pipeline_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"model: .*no model_index\.json"):
        DiffusionEngine.check(make_stage(tmp_path))


async def test_a_configuration_that_does_not_fit_the_pipeline_is_named(tiny: Tiny) -> None:
    engine = DiffusionEngine(make_stage(tiny("image"), engine_args={"cache_backend": "first_block_cache"}), DEVICES)
    try:
        with pytest.raises(EngineConfigError, match=r"engine_args\.cache_backend: UNet2DConditionModel cannot"):
            await engine.start()
    finally:
        await engine.stop()


async def test_weights_that_cannot_be_read_say_so(tiny: Tiny, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    process = await asyncio.create_subprocess_exec("cp", "-r", str(tiny("image")), str(broken))
    assert await process.wait() == 0
    (broken / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"short")
    engine = DiffusionEngine(make_stage(broken), DEVICES)
    try:
        with pytest.raises(MeshError) as caught:
            await engine.start()
        assert caught.value.reason is Reason.START_FAILED
        assert "afetensor" in caught.value.message
    finally:
        await engine.stop()

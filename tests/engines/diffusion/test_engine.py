"""The diffusion engine with a real pipeline in its child process: requests, batches, aborts, control."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from engine_harness import CORE, DEVICES, Sink, Tiny, alive, leftovers, make, make_stage, submitted
from PIL import Image

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh_worker.engines.base import EngineInput
from stagemesh_worker.engines.diffusion.engine import DiffusionEngine

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]
pytest.importorskip("diffusers")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny: Tiny) -> AsyncIterator[DiffusionEngine]:
    stage = make_stage(
        tiny("image"), engine_args={"max_num_seqs": 4, "batch_wait_ms": 30}, lora_modules={"ink": str(tiny("lora"))}
    )
    DiffusionEngine.check(stage)
    engine = DiffusionEngine(stage, DEVICES)
    await engine.start()
    yield engine
    await engine.stop()
    assert leftovers() == []


# ------------------------------------------------------------------ a request
async def test_R21_a_request_gets_its_steps_its_picture_and_its_figures(engine: DiffusionEngine) -> None:
    sink = await make(engine, seed=5)
    assert [(step.step, step.total_steps) for step in sink.steps] == [(number, 5) for number in range(1, 6)]
    (file,) = sink.files
    assert (file.mime_type, file.width, file.height, file.seed) == ("image/png", 64, 64, 5)
    assert sink.picture.shape == (64, 64, 3)
    assert sink.finished is not None
    assert sink.finished.finish_reason == frame_pb.FINISH_REASON_COMPLETE
    assert (sink.finished.usage.diffusion_steps, sink.finished.usage.images) == (5, 1)
    timings = sink.finished.timings
    assert 0 < timings.first_output.ToNanoseconds() <= timings.total.ToNanoseconds()
    assert sink.queue_s >= 0


async def test_an_unset_seed_is_chosen_and_told_so_that_the_picture_can_be_made_again(engine: DiffusionEngine) -> None:
    first = await make(engine)
    again = await make(engine, seed=first.files[0].seed)
    assert again.files[0].data == first.files[0].data
    assert (await make(engine)).files[0].seed != first.files[0].seed


async def test_several_pictures_of_one_prompt_can_each_be_made_again_alone(engine: DiffusionEngine) -> None:
    several = await make(engine, seed=100, num_images_per_prompt=3)
    assert [(file.index, file.seed) for file in several.files] == [(0, 100), (1, 101), (2, 102)]
    alone = await make(engine, seed=102)
    third = np.asarray(Image.open(io.BytesIO(several.files[2].data)))
    assert np.abs(third.astype(int) - alone.picture).max() <= 1
    assert several.finished is not None
    assert several.finished.usage.images == 3


async def test_R21_previews_come_every_n_steps_but_not_instead_of_the_picture(engine: DiffusionEngine) -> None:
    sink = await make(engine, seed=5, preview_interval_steps=2)
    assert [step.step for step in sink.steps if step.HasField("preview")] == [2, 4]
    preview = next(step.preview for step in sink.steps if step.HasField("preview"))
    assert Image.open(io.BytesIO(preview.data)).size == (64, 64)
    assert (preview.mime_type, len(sink.files)) == ("image/jpeg", 1)


@pytest.mark.parametrize(("output_format", "mime"), [("jpeg", "image/jpeg"), ("webp", "image/webp")])
async def test_other_formats(engine: DiffusionEngine, output_format: str, mime: str) -> None:
    sink = await make(engine, output_format=output_format)
    assert sink.files[0].mime_type == mime
    assert sink.picture.shape[:2] == (64, 64)


async def test_raw_output_is_a_tensor_of_pixels(engine: DiffusionEngine) -> None:
    sink = await make(engine, output_format="raw", seed=5)
    assert np.array_equal(sink.tensors["image"], (await make(engine, seed=5)).picture)
    several = await make(engine, output_format="raw", num_images_per_prompt=2)
    assert list(several.tensors) == ["image/0", "image/1"]


async def test_who_wants_only_the_result_gets_no_progress(engine: DiffusionEngine) -> None:
    sink = await make(engine, delta=False, preview_interval_steps=1)
    assert (sink.steps, len(sink.files)) == ([], 1)


async def test_text_that_comes_in_chunks_is_waited_for(engine: DiffusionEngine) -> None:
    async def rest() -> AsyncIterator[EngineInput]:
        yield EngineInput(text="red ")
        yield EngineInput(text="circle")

    chunked = await make(engine, "a ", more_input=rest(), seed=1)
    whole = await make(engine, "a red circle", seed=1)
    other = await make(engine, "a ", seed=1)
    assert chunked.files[0].data == whole.files[0].data != other.files[0].data


async def test_a_slow_consumer_holds_only_itself_back(engine: DiffusionEngine) -> None:
    slow = Sink()
    slow.open.clear()
    held = asyncio.create_task(make(engine, sink=slow, num_inference_steps=6))
    await make(engine)
    await make(engine)
    assert (slow.steps, slow.finished) == ([], None)
    slow.open.set()
    await held
    assert (slow.steps[-1].step, len(slow.files)) == (6, 1)


# ------------------------------------------------------------------ batches
async def test_R21_compatible_requests_share_a_call_and_get_their_own_pictures(engine: DiffusionEngine) -> None:
    before = engine.load().steps
    sinks = await asyncio.gather(*(make(engine, f"a circle {seed}", seed=seed) for seed in range(4)))
    assert engine.load().steps - before == 5  # and not 20
    for seed, sink in enumerate(sinks):
        alone = await make(engine, f"a circle {seed}", seed=seed)
        assert np.abs(sink.picture.astype(int) - alone.picture).max() <= 1
        assert len(sink.steps) == 5


async def test_requests_of_other_sizes_do_not_share_it(engine: DiffusionEngine) -> None:
    before = engine.load().steps
    small, large = await asyncio.gather(make(engine, height=32, width=32), make(engine))
    assert (small.picture.shape, large.picture.shape) == ((32, 32, 3), (64, 64, 3))
    assert engine.load().steps - before == 10


async def test_one_that_leaves_a_batch_does_not_disturb_the_others(engine: DiffusionEngine) -> None:
    stop_at_two = asyncio.Event()
    sink = Sink(lambda step: stop_at_two.set() if step == 2 else None)
    leaver = asyncio.create_task(make(engine, sink=sink, seed=1, num_inference_steps=30))
    stayer = asyncio.create_task(make(engine, seed=2, num_inference_steps=30))
    await asyncio.wait_for(stop_at_two.wait(), 30)
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    assert not stayer.done()
    alone = await make(engine, seed=2, num_inference_steps=30)
    assert np.abs((await stayer).picture.astype(int) - alone.picture).max() <= 1
    assert (sink.files, sink.finished) == ([], None)


async def test_a_prompt_that_breaks_the_call_does_not_break_its_neighbours(engine: DiffusionEngine) -> None:
    # Its negative prompt is a text like the others', but the size is refused for the whole call.
    bad, good = await asyncio.gather(make(engine, height=60, width=60), make(engine, seed=3), return_exceptions=True)
    assert isinstance(bad, MeshError)
    assert isinstance(good, Sink)
    assert good.picture.shape == (64, 64, 3)


# ------------------------------------------------------------------ aborts
async def test_R21_an_abort_stops_the_denoising_within_two_steps(engine: DiffusionEngine) -> None:
    third = asyncio.Event()
    sink = Sink(lambda step: third.set() if step == 3 else None)
    before = engine.load().steps
    running = asyncio.create_task(make(engine, sink=sink, num_inference_steps=200))
    await asyncio.wait_for(third.wait(), 30)
    made = engine.load().steps - before
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert engine.load().running == 0
    await make(engine)
    assert engine.load().steps - before - 5 <= made + 2


async def test_a_waiting_request_leaves_without_having_run(engine: DiffusionEngine) -> None:
    began = asyncio.Event()
    first = asyncio.create_task(make(engine, sink=Sink(lambda step: began.set()), num_inference_steps=60))
    await asyncio.wait_for(began.wait(), 30)
    sink = Sink()
    waiting = asyncio.create_task(make(engine, sink=sink, num_inference_steps=7))
    await submitted(engine)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (engine.load().waiting, engine.load().running, sink.queue_s) == (0, 1, -1.0)
    await first


async def test_many_aborts_at_any_moment_leave_a_working_engine(engine: DiffusionEngine) -> None:
    moments = np.random.default_rng(3).uniform(0, 0.15, 40)

    async def begin_and_leave(moment: float) -> None:
        running = asyncio.create_task(make(engine))
        await asyncio.wait({running}, timeout=moment)
        running.cancel()
        await asyncio.wait({running}, timeout=30)
        assert running.done()

    await asyncio.gather(*(begin_and_leave(moment) for moment in moments))
    assert (engine.load().running, engine.load().waiting) == (0, 0)
    assert len((await make(engine)).files) == 1


# ------------------------------------------------------------------ bad requests
@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"height": 60}, "height"),
        ({"height": 1 << 20}, "height"),
        ({"extra": {"clip_skip": 50}}, None),
        ({"extra": {"cross_attention_kwargs": {"no": "such"}}}, None),
        ({"timesteps": [2000.0, 5.0]}, "timesteps"),
    ],
)
async def test_a_bad_request_fails_alone_and_the_child_lives(
    engine: DiffusionEngine, params: dict[str, Any], field: str | None
) -> None:
    pid = engine.pid
    if "timesteps" in params:
        params = {**params, "num_inference_steps": None}
    try:
        await make(engine, **params)
    except MeshError as error:
        assert error.reason in (Reason.INVALID_REQUEST, Reason.STAGE_FAILED)
        if field is not None:
            assert (error.reason, error.metadata["field"]) == (Reason.INVALID_REQUEST, field)
            assert error.message.startswith(f"{field}: ")
    else:
        assert field is None
    assert engine.pid == pid
    assert len((await make(engine)).files) == 1


# ------------------------------------------------------------------ control
async def test_R21_adapters_by_request_and_by_call(engine: DiffusionEngine) -> None:
    plain = (await make(engine, seed=1)).files[0].data
    assert await engine.call("list_loras", [], {}) == []
    inked = await make(engine, seed=1, lora=sampling_pb.LoraRequest(name="ink"))
    assert inked.files[0].data != plain
    assert await engine.call("list_loras", [], {}) == ["ink"]
    assert (await make(engine, seed=1)).files[0].data == plain
    assert await engine.call("remove_lora", ["ink"], {}) is True
    assert await engine.call("load_lora", [], {"name": "ink"}) is True
    assert await engine.call("unload_lora", [], {"name": "ink"}) is True
    with pytest.raises(MeshError, match=r"'oil' is not one of the stage's lora_modules \(ink\)") as caught:
        await make(engine, lora=sampling_pb.LoraRequest(name="oil"))
    assert caught.value.reason is Reason.INVALID_REQUEST
    with pytest.raises(MeshError, match="must name one of lora_modules"):
        await engine.call("add_lora", [], {})


async def test_paused_and_asleep_requests_wait_and_then_run(engine: DiffusionEngine) -> None:
    for stop, go in (("pause", "resume"), ("sleep", "wake_up")):
        await engine.call(stop, [], {})
        assert await engine.call("is_sleeping", [], {}) is (stop == "sleep")
        waiting = asyncio.create_task(make(engine, seed=1))
        await submitted(engine)
        await engine.check_progress(10)
        load = engine.load()
        assert (load.running, load.waiting, load.since_progress_s) == (0, 1, 0.0)
        await engine.call(go, [], {})
        assert len((await waiting).files) == 1
    assert await engine.call("is_sleeping", [], {}) is False


async def test_health_is_answered_between_two_steps(engine: DiffusionEngine) -> None:
    began = asyncio.Event()
    running = asyncio.create_task(make(engine, sink=Sink(lambda step: began.set()), num_inference_steps=60))
    await asyncio.wait_for(began.wait(), 30)
    assert await engine.call("check_health", [], {}) is True
    assert not running.done()
    await running


async def test_every_call_method_is_known(engine: DiffusionEngine) -> None:
    for method in sorted(engine.call_methods):
        try:
            await engine.call(method, ["ink"] if "lora" in method else [], {})
        except MeshError as error:
            raise AssertionError(method) from error
    with pytest.raises(MeshError, match="no such method"):
        await engine.call("reset_prefix_cache", [], {})


# ------------------------------------------------------------------ where it runs, and how it ends
async def test_the_child_keeps_to_its_cores_and_the_engine_needs_no_torch(engine: DiffusionEngine) -> None:
    await make(engine)
    for thread in Path(f"/proc/{engine.pid}/task").iterdir():
        assert f"Cpus_allowed_list:\t{CORE}\n" in (thread / "status").read_text()
    script = (
        "import sys; import stagemesh_worker.engines.diffusion.engine; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'diffusers', 'transformers')))"
    )
    assert await (await asyncio.create_subprocess_exec(sys.executable, "-c", script)).wait() == 0


async def test_R21_two_replicas_make_the_same_picture_from_the_same_seed(engine: DiffusionEngine, tiny: Tiny) -> None:
    other = DiffusionEngine(make_stage(tiny("image")), DEVICES)
    await other.start()
    try:
        assert (await make(other, seed=9)).files[0].data == (await make(engine, seed=9)).files[0].data
    finally:
        await other.stop()
        await other.stop()
    assert other.pid is None or not alive(other.pid)

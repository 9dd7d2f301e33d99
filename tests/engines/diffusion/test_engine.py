"""The diffusion engine with a real pipeline in its child process."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from stagemesh.config import Stage
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_worker.engines.base import DeviceSet, EngineConfigError, EngineInput, EngineTask
from stagemesh_worker.engines.diffusion.engine import DiffusionEngine
from stagemesh_worker.rundir import run_directory

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]
pytest.importorskip("diffusers")

Tiny = Callable[[str], Path]
CORE = sorted(os.sched_getaffinity(0))[0]
DEVICES = DeviceSet(ids=("cpu:0",), cores=(CORE,))


def make_stage(folder: Path, **changes: Any) -> Stage:
    values: dict[str, Any] = {
        "stage_id": 1,
        "name": "painter",
        "stage_type": "diffusion",
        "model": str(folder),
        "default_sampling_params": {"num_inference_steps": 5, "guidance_scale": 2.0},
        **changes,
    }
    return Stage(**values)


class Sink:
    """Keeps what a task says; `credit` limits how much it takes before `grant`."""

    def __init__(self, on_progress: Callable[[int], None] = lambda step: None) -> None:
        self.queue_s = -1.0
        self.steps: list[frame_pb.Progress] = []
        self.files: list[frame_pb.MediaOutput] = []
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}
        self.finished: frame_pb.StageFinished | None = None
        self.open = asyncio.Event()
        self.open.set()
        self._on_progress = on_progress

    def started(self, engine_queue_s: float = 0.0) -> None:
        self.queue_s = engine_queue_s

    def tokens(self, token_ids: Sequence[int], text: str) -> None:
        raise AssertionError("a diffusion stage makes no tokens")

    def text(self, delta: frame_pb.TextDelta) -> None:
        raise AssertionError("a diffusion stage makes no text")

    def audio(self, chunk: frame_pb.AudioChunk) -> None:
        raise AssertionError("not used")

    def progress(self, progress: frame_pb.Progress) -> None:
        self.steps.append(progress)
        self._on_progress(progress.step)

    def media(self, media: frame_pb.MediaOutput) -> None:
        self.files.append(media)

    def tensor(self, name: str, array: Any) -> None:
        self.tensors[name] = array

    def finish(self, finished: frame_pb.StageFinished) -> None:
        assert self.finished is None
        self.finished = finished

    @property
    def writable(self) -> bool:
        return self.open.is_set()

    async def ready(self) -> None:
        await self.open.wait()

    @property
    def picture(self) -> np.ndarray[Any, Any]:
        (file,) = self.files
        return np.asarray(Image.open(io.BytesIO(file.data)))


def task(
    text: str = "a red circle", *, delta: bool = True, given: EngineInput | None = None, **params: Any
) -> EngineTask:
    extra, lora = params.pop("extra", {}), params.pop("lora", None)
    more = params.pop("more_input", None)
    diffusion = sampling_pb.DiffusionSamplingParams(**{"num_inference_steps": 5, "guidance_scale": 2.0, **params})
    diffusion.extra.update(extra)
    submit = stage_pb.SubmitTask(
        slot=1, request_id="r", params=sampling_pb.SamplingParams(diffusion=diffusion), delta=delta, lora=lora
    )
    return EngineTask(submit, given or EngineInput(text=text), more)


async def make(engine: DiffusionEngine, *args: Any, sink: Sink | None = None, **params: Any) -> Sink:
    sink = sink or Sink()
    await asyncio.wait_for(engine.run(task(*args, **params), sink), 60)
    return sink


async def submitted(engine: DiffusionEngine) -> None:
    """Let tasks that were just made reach the engine's queue."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert engine.load().waiting


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def leftovers() -> list[str]:
    return sorted(path.name for path in run_directory().glob("diffusion-*"))


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
async def test_a_request_gets_its_steps_its_picture_and_its_figures(engine: DiffusionEngine) -> None:
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


async def test_previews_come_every_n_steps_but_not_instead_of_the_picture(engine: DiffusionEngine) -> None:
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
async def test_compatible_requests_share_a_call_and_get_their_own_pictures(engine: DiffusionEngine) -> None:
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
async def test_an_abort_stops_the_denoising_within_two_steps(engine: DiffusionEngine) -> None:
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
async def test_adapters_by_request_and_by_call(engine: DiffusionEngine) -> None:
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


async def test_two_replicas_make_the_same_picture_from_the_same_seed(engine: DiffusionEngine, tiny: Tiny) -> None:
    other = DiffusionEngine(make_stage(tiny("image")), DEVICES)
    await other.start()
    try:
        assert (await make(other, seed=9)).files[0].data == (await make(engine, seed=9)).files[0].data
    finally:
        await other.stop()
        await other.stop()
    assert other.pid is None or not alive(other.pid)


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

"""A diffusion engine as a replica has it: stages, tasks, a sink that keeps what they say."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stagemesh.config import Stage
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_worker.engines.base import DeviceSet, EngineInput, EngineTask
from stagemesh_worker.engines.diffusion.engine import DiffusionEngine
from stagemesh_worker.rundir import run_directory

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

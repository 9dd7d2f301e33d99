"""One request inside the engine: what the child said of it, and its way into the task's sink."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import numpy as np
from google.protobuf import struct_pb2

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.wire import duration
from stagemesh_worker.engines.base import TaskSink
from stagemesh_worker.engines.diffusion.facts import PipelineFacts
from stagemesh_worker.engines.diffusion.media import encode_image, encode_preview, encode_video, encode_wav
from stagemesh_worker.engines.diffusion.protocol import ItemEnded, Output
from stagemesh_worker.engines.diffusion.request import DiffusionRequest

KEPT_PROGRESS = 64
"""Progress that waits for a slow consumer; older steps are left out."""

_Progress = tuple[int, int, np.ndarray[Any, Any] | None]


class Visit:
    """One request, from the queue to its end."""

    def __init__(self, number: int, request: DiffusionRequest, submitted: float, *, wants_progress: bool) -> None:
        self.number = number
        self.request = request
        self.submitted = submitted
        self.wants_progress = wants_progress
        self.end = asyncio.Event()
        """The child works on it no more."""
        self.started_at: float | None = None
        self._news = asyncio.Event()
        self._progress: deque[_Progress] = deque(maxlen=KEPT_PROGRESS)
        self._outputs: deque[Output] = deque()
        self._ending: ItemEnded | MeshError | None = None

    @property
    def ended(self) -> bool:
        """Whether the child works on it no more."""
        return self.end.is_set()

    def began(self, now: float) -> None:
        """The child got it."""
        self.started_at = now
        self._news.set()

    def step(self, step: int, total: int, preview: np.ndarray[Any, Any] | None) -> None:
        """A step was made."""
        if self.wants_progress:
            self._progress.append((step, total, preview))
            self._news.set()

    def output(self, output: Output) -> None:
        """One of its outputs is there."""
        self._outputs.append(output)

    def finish(self, ending: ItemEnded) -> None:
        """Nothing follows."""
        self._ending = ending
        self.end.set()
        self._news.set()

    def fail(self, error: MeshError) -> None:
        """Nothing follows, because the engine is gone."""
        self._ending = self._ending or error
        self.end.set()
        self._news.set()

    async def next_progress(self) -> _Progress | None:
        """The next step, or None at the end. Returns also when the child began, as step 0."""
        while not self._progress:
            if self._ending is not None:
                return None
            self._news.clear()
            await self._news.wait()
            if self.started_at is not None and not self._progress and self._ending is None:
                return 0, 0, None
        return self._progress.popleft()

    def result(self) -> tuple[ItemEnded, list[Output]]:
        """How it ended.

        Raises:
            MeshError: badly.
        """
        ending = self._ending
        if isinstance(ending, MeshError):
            raise ending
        assert ending is not None
        if ending.status == "invalid":
            raise MeshError(Reason.INVALID_REQUEST, f"{ending.field}: {ending.message}", field=ending.field)
        if ending.status == "aborted":
            raise MeshError(Reason.REQUEST_ABORTED)
        if ending.status != "done":
            raise MeshError(Reason.STAGE_FAILED, ending.message)
        return ending, list(self._outputs)


async def forward(visit: Visit, sink: TaskSink, facts: PipelineFacts) -> None:
    """Bring what happens to `visit` into `sink`, to its end.

    Raises:
        MeshError: it failed.
    """
    started, first_output = False, 0.0
    while (progress := await visit.next_progress()) is not None:
        step, total, preview = progress
        if not started and visit.started_at is not None:
            started = True
            sink.started(visit.started_at - visit.submitted)
        if step == 0:
            continue
        frame = frame_pb.Progress(step=step, total_steps=total)
        if preview is not None:
            frame.preview.CopyFrom(await asyncio.to_thread(encode_preview, preview))
        await sink.ready()
        first_output = first_output or time.monotonic()
        sink.progress(frame)
    ending, outputs = visit.result()
    for output in outputs:
        await sink.ready()
        await _emit(output, visit.request, sink, facts)
        first_output = first_output or time.monotonic()
    sink.finish(_finished(visit, ending, outputs, facts, first_output))


async def _emit(output: Output, request: DiffusionRequest, sink: TaskSink, facts: PipelineFacts) -> None:
    array = output.arrays["output"]
    if output.kind == "latent" or request.output_format == "raw":
        name = "latents" if output.kind == "latent" else output.kind
        sink.tensor(name if len(request.seeds) == 1 else f"{name}/{output.index}", array)
        return
    if output.kind == "audio":
        media = await asyncio.to_thread(encode_wav, array, facts.sample_rate_hz, index=output.index, seed=output.seed)
    else:
        encode = encode_video if output.kind == "video" else encode_image
        media = await asyncio.to_thread(encode, array, request.output_format, index=output.index, seed=output.seed)
    sink.media(media)


def _finished(
    visit: Visit, ending: ItemEnded, outputs: list[Output], facts: PipelineFacts, first_output: float
) -> frame_pb.StageFinished:
    usage = frame_pb.Usage(diffusion_steps=ending.steps)
    if facts.modality == "audio":
        samples = sum(output.arrays["output"].shape[0] for output in outputs if output.kind == "audio")
        usage.audio_seconds = samples / facts.sample_rate_hz if facts.sample_rate_hz else 0.0
    else:
        usage.images = len(outputs)
    finished = frame_pb.StageFinished(
        finish_reason=frame_pb.FINISH_REASON_COMPLETE,
        usage=usage,
        timings=frame_pb.StageTimings(
            engine_queue=duration((visit.started_at or visit.submitted) - visit.submitted),
            first_output=duration(first_output - visit.submitted),
            total=duration(time.monotonic() - visit.submitted),
        ),
        extra=struct_pb2.Struct(),
    )
    finished.extra.update({"seeds": [str(seed) for seed in visit.request.seeds]})
    if any(output.flagged for output in outputs):
        finished.extra.update({"nsfw_content_detected": [output.flagged for output in outputs]})
    return finished

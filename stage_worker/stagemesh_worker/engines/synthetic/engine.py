"""The synthetic engine: one stepper for the tokens of all tasks, a short coroutine each for everything else."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stagemesh.config import Stage
from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh_worker.engines.base import DeviceSet, Engine, EngineInput, EngineLoad, EngineTask, TaskSink
from stagemesh_worker.engines.synthetic import content
from stagemesh_worker.engines.synthetic.options import SyntheticOptions
from stagemesh_worker.engines.synthetic.request import plan_text, prompt_text, prompt_tokens, task_key
from stagemesh_worker.engines.synthetic.stepper import Stepper, TokenRun
from stagemesh_worker.engines.synthetic.waiting import WaitingLine

_OUTPUT_OF_TYPE = {"text": "text", "image": "image", "audio": "audio", "video": "image", "latent": "tensor"}


class SyntheticEngine(Engine):
    """Deterministic text, images, sound or tensors; see `SyntheticOptions`."""

    name = "synthetic"
    call_methods = frozenset(
        {"check_health", "is_sleeping", "pause", "reset_prefix_cache", "resume", "sleep", "wake_up"}
    )

    def __init__(self, stage: Stage, devices: DeviceSet) -> None:
        super().__init__(stage, devices)
        self.options = SyntheticOptions.parse(stage.engine_args)
        self.output = self.options.output or _OUTPUT_OF_TYPE.get(stage.final_output_type or "text", "text")
        self.max_concurrency = self.options.max_num_seqs
        self.version = importlib.metadata.version("stagemesh")
        self._stepper = Stepper(self.options.tokens_per_second)
        self._line = WaitingLine(self.options.max_num_seqs)
        self._loop_task: asyncio.Task[None] | None = None
        self._dead = asyncio.Event()

    @classmethod
    def check(cls, stage: Stage) -> None:
        """Check `engine_args`."""
        SyntheticOptions.parse(stage.engine_args)

    async def start(self) -> None:
        """Start stepping, after `start_seconds`."""
        self.report_phase("loading nothing")
        await asyncio.sleep(self.options.start_seconds)
        if self.options.crash_on_start:
            raise RuntimeError(self.options.crash_on_start)
        limits = [limit for limit in (self.options.die_after, self.options.stall_after) if limit]
        self._stepper.limit = min(limits, default=None)
        self._loop_task = asyncio.create_task(self._stepper.loop(), name="synthetic stepper")

    async def run(self, task: EngineTask, sink: TaskSink) -> None:
        """Run one task: its prompt, then each further chunk of input. Raises MeshError."""
        arrived = time.monotonic()
        async with self._line.place(task.submit.priority):
            sink.started(time.monotonic() - arrived)
            work = asyncio.ensure_future(self._run(task, sink))
            death = asyncio.ensure_future(self._dead.wait())
            try:
                await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise MeshError(Reason.ENGINE_DEAD, self._death())
                work.result()
            finally:
                death.cancel()
                if not work.done():
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)

    async def _run(self, task: EngineTask, sink: TaskSink) -> None:
        finished = frame_pb.StageFinished(finish_reason=frame_pb.FINISH_REASON_COMPLETE)
        value: EngineInput | None = task.input
        chunk, delay = 0, self.options.first_token_delay_s
        while value is not None:
            if self.options.fail_on and self.options.fail_on in prompt_text(value):
                raise MeshError(Reason.STAGE_FAILED, f"told to fail on {self.options.fail_on!r}", stage=self.stage.name)
            finished.usage.prompt_tokens += prompt_tokens(value)
            if self.output == "text":
                await self._make_text(task, value, sink, delay, finished)
            else:
                await asyncio.sleep(delay)
                if self.output == "image":
                    await self._make_images(task, value, sink, finished)
                elif self.output == "audio":
                    await self._make_audio(task, value, sink, chunk, finished)
                else:
                    await self._stepper.step_once()
                    await sink.ready()
                    sink.tensor("hidden_states", content.tensor(task_key(task, value), self.options.tensor_shape))
            value = await anext(task.more_input, None) if task.more_input is not None else None
            chunk, delay = chunk + 1, 0.0
        sink.finish(finished)

    async def _make_text(
        self, task: EngineTask, value: EngineInput, sink: TaskSink, delay: float, finished: frame_pb.StageFinished
    ) -> None:
        plan = plan_text(task, value, self.options)
        finished.finish_reason, finished.stop_reason = plan.finish_reason, plan.stop_reason
        finished.usage.completion_tokens += plan.end
        run = TokenRun(plan.stream, sink, plan.start, plan.end, plan.text_end)
        if plan.start:
            made = content.text_of(plan.stream.tokens(0, plan.start))
            made = made if plan.text_end is None else made[: plan.text_end]
            run.text_made = len(made)
            run.held_text = made[task.submit.resume_text_chars :]
        if run.position == run.end:
            if run.held_text:
                sink.tokens((), run.held_text)
            return
        try:
            while run.position < run.end:
                await sink.ready()
                self._stepper.add(run, delay)
                delay = 0.0
                await run.done.wait()
        finally:
            self._stepper.remove(run)

    async def _make_images(
        self, task: EngineTask, value: EngineInput, sink: TaskSink, finished: frame_pb.StageFinished
    ) -> None:
        params = task.submit.params.diffusion
        if params.HasField("num_inference_steps") and params.num_inference_steps < 1:
            raise invalid("num_inference_steps", params.num_inference_steps, "want 1 or more")
        steps = params.num_inference_steps or self.options.steps
        width, height = params.width or self.options.image_size, params.height or self.options.image_size
        for field, size in (("width", width), ("height", height)):
            if size > 4096:
                raise invalid(field, size, "want 4096 or less")
        kind = params.output_format or "png"
        if kind not in ("png", "jpeg", "webp", "raw"):
            raise invalid("output_format", kind, "want png, jpeg, webp or raw")
        key = task_key(task, value)
        for step in range(1, steps + 1):
            await asyncio.sleep(self.options.step_seconds)
            await self._stepper.step_once()
            progress = frame_pb.Progress(step=step, total_steps=steps)
            if params.preview_interval_steps and step % params.preview_interval_steps == 0 and step < steps:
                pixels = await asyncio.to_thread(content.image, key, width, height, step / steps)
                data = await asyncio.to_thread(content.encode_image, pixels, "png")
                progress.preview.CopyFrom(_media(data, "png", 0, width, height, params.seed))
            sink.progress(progress)
        finished.usage.diffusion_steps += steps
        for index in range(params.num_images_per_prompt or 1):
            pixels = await asyncio.to_thread(content.image, key + bytes([index % 256]), width, height)
            await sink.ready()
            if kind == "raw":
                sink.tensor("image", pixels)
            else:
                data = await asyncio.to_thread(content.encode_image, pixels, kind)
                sink.media(_media(data, kind, index, width, height, params.seed))
            finished.usage.images += 1

    async def _make_audio(
        self, task: EngineTask, value: EngineInput, sink: TaskSink, chunk: int, finished: frame_pb.StageFinished
    ) -> None:
        rate = self.options.sample_rate_hz
        samples = int((task.submit.params.diffusion.audio_seconds or self.options.audio_seconds) * rate)
        await self._stepper.step_once()
        start = int(finished.usage.audio_seconds * rate + 0.5)
        tone = await asyncio.to_thread(content.sound, task_key(task, value), start, samples, rate)
        await sink.ready()
        inline = tensor_pb.Tensor(dtype="float32", shape=[samples], data=tone.tobytes())
        sink.audio(
            frame_pb.AudioChunk(
                samples=tensor_pb.TensorValue(inline=inline),
                sample_rate_hz=rate,
                offset_samples=start,
                last=task.more_input is None,
            )
        )
        finished.usage.audio_seconds += samples / rate

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one of `call_methods`."""
        if method in ("sleep", "pause"):
            self._stepper.pause()
        elif method in ("wake_up", "resume"):
            self._stepper.resume()
        elif method == "is_sleeping":
            return self._stepper.paused
        elif method == "check_health":
            await self.check_progress(1.0)
        elif method == "reset_prefix_cache":
            return True
        else:
            raise NotImplementedError(method)
        return None

    def load(self) -> EngineLoad:
        """Tasks that run and wait, and how long ago the last step was."""
        stepper = self._stepper
        busy = self._line.running and not stepper.paused
        since = time.monotonic() - max(stepper.last_step_at, self._line.busy_since) if busy else 0.0
        return EngineLoad(self._line.running, self._line.waiting, 0.0, stepper.steps, since)

    async def died(self) -> str:
        """Wait until `die_after` was reached."""
        await self._stepper.limit_reached.wait()
        if self._stepper.limit != self.options.die_after:
            await asyncio.Event().wait()  # it only stalls
        self._dead.set()
        return self._death()

    async def check_progress(self, timeout_s: float) -> None:
        """Raises MeshError(ENGINE_STUCK) once `stall_after` was reached."""
        if self._stepper.limit_reached.is_set():
            raise MeshError(Reason.ENGINE_STUCK, f"told to stall after {self._stepper.limit} tokens and steps")

    async def stop(self) -> None:
        """End the stepper."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
            self._loop_task = None

    def _death(self) -> str:
        return f"told to die after {self.options.die_after} tokens and steps"


def _media(data: bytes, kind: str, index: int, width: int, height: int, seed: int) -> frame_pb.MediaOutput:
    return frame_pb.MediaOutput(
        modality=frame_pb.MODALITY_IMAGE,
        mime_type=f"image/{kind}",
        data=data,
        index=index,
        width=width,
        height=height,
        seed=seed,
    )

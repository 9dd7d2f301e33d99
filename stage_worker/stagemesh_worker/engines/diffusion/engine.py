"""The engine as the replica sees it: checks requests, batches them for the child, forwards what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stagemesh.config import Stage
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_worker.engines.base import DeviceSet, Engine, EngineConfigError, EngineLoad, EngineTask, TaskSink
from stagemesh_worker.engines.diffusion.batching import BatchQueue
from stagemesh_worker.engines.diffusion.facts import PipelineFacts
from stagemesh_worker.engines.diffusion.inputs import whole_input
from stagemesh_worker.engines.diffusion.media import encode_grey
from stagemesh_worker.engines.diffusion.process import ChildProcess
from stagemesh_worker.engines.diffusion.protocol import (
    Abort,
    Call,
    Failed,
    Item,
    ItemEnded,
    JobEnded,
    Message,
    Output,
    Ready,
    Result,
    Run,
    Step,
)
from stagemesh_worker.engines.diffusion.request import build_request
from stagemesh_worker.engines.diffusion.startup import check_defaults, parse_stage
from stagemesh_worker.engines.diffusion.visit import Visit, forward

MAX_WAITING = 1024
"""Requests in the engine's queue; the head holds back long before."""
ABORT_WAIT_S = 30.0
"""How long an abort waits for the step at hand, in seconds."""
CALL_WAIT_S = 120.0
"""How long a control method may take, loading an adapter from a slow disk included, in seconds."""

PROBE_PIXELS = 256
"""Side of the self-probe's picture where the pipeline does not say its own."""


class DiffusionEngine(Engine):
    """Any diffusers pipeline, in a child process."""

    name = "diffusion"
    call_methods = frozenset(
        {"check_health", "add_lora", "load_lora", "remove_lora", "unload_lora", "list_loras"}
        | {"pause", "resume", "sleep", "wake_up", "is_sleeping"}
    )

    def __init__(self, stage: Stage, devices: DeviceSet) -> None:
        super().__init__(stage, devices)
        self._options = parse_stage(stage)
        self.max_concurrency = self._options.max_num_seqs
        self._facts: PipelineFacts | None = None
        self._child: ChildProcess | None = None
        self._loaded: asyncio.Future[PipelineFacts] | None = None
        self._queue: BatchQueue[Visit] = BatchQueue(self._options.max_num_seqs, self._options.batch_wait_ms / 1000)
        self._queue_changed = asyncio.Event()
        self._running: dict[int, Visit] = {}
        self._job_ended = asyncio.Event()
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._awake = asyncio.Event()
        self._awake.set()
        self._asleep = False
        self._steps = 0
        self._progressed = time.monotonic()
        self._dispatcher: asyncio.Task[None] | None = None
        self._gone: asyncio.Task[None] | None = None
        self._dead = asyncio.Event()
        self._why_dead = ""

    @classmethod
    def check(cls, stage: Stage) -> None:
        """Check the stage's `engine_args`, without torch; what only the loaded pipeline knows is checked at start."""
        parse_stage(stage)
        if not (Path(stage.model) / "model_index.json").is_file():
            raise EngineConfigError(
                f"model: {str(stage.model)!r}: has no model_index.json: "
                "give a folder that a diffusers pipeline was saved to"
            )

    @property
    def pid(self) -> int | None:
        """Process that computes, for memory reports; None before the start."""
        return self._child.pid if self._child is not None else None

    async def start(self) -> None:
        """Load the pipeline in the child.

        Raises:
            EngineConfigError: the folder, an argument or a default does not fit.
            MeshError: START_FAILED, with the child's last lines.
        """
        self._loaded = asyncio.get_running_loop().create_future()
        self._child = ChildProcess(self.devices, self._heard)
        self.report_phase("loading weights")
        await self._child.start(
            {
                "model": str(self.stage.model),
                "options": self._options.to_json(),
                "lora_modules": {name: str(path) for name, path in (self.stage.lora_modules or {}).items()},
            }
        )
        self._gone = asyncio.create_task(self._watch(self._child), name="diffusion-gone")
        self._facts = await self._loaded
        self.version = self._facts.version
        check_defaults(self.stage, self._facts, self._options)
        self._dispatcher = asyncio.create_task(self._dispatch(), name="diffusion-dispatch")

    def probe_task(self) -> stage_pb.SubmitTask:
        """One step; on a grey picture where the pipeline reads one."""
        task, facts = super().probe_task(), self._alive()
        if "image" in facts.arguments:
            grey = encode_grey(facts.native_width or PROBE_PIXELS, facts.native_height or PROBE_PIXELS)
            names = ("image", "mask_image") if "mask_image" in facts.arguments else ("image",)
            task.prompt.media.extend(prompt_pb.MediaInput(modality="image", data=grey) for _ in names)
        if "strength" in facts.arguments:
            task.params.diffusion.strength = 1.0  # less of a single step is none
        return task

    async def run(self, task: EngineTask, sink: TaskSink) -> None:
        """Make one request's pictures, sounds or videos."""
        facts = self._alive()
        submitted = time.monotonic()
        request = build_request(
            await whole_input(task),
            task.submit.params.diffusion,
            facts,
            self._options,
            lora=_lora(task),
            latents_out=self.stage.final_output_type == "latent",
        )
        self._alive()
        if len(self._queue) >= MAX_WAITING:
            raise MeshError(Reason.OVERLOADED, f"stage {self.stage.name}: {MAX_WAITING} requests wait already")
        visit = Visit(next(self._numbers), request, submitted, wants_progress=task.submit.delta)
        key, size = request.batch_key if facts.batches_prompts else None, len(request.seeds)
        if not self._queue and not self._running:
            self._progressed = submitted
        self._queue.add(visit, key=key, size=size, priority=task.submit.priority, now=submitted)
        self._queue_changed.set()
        try:
            await forward(visit, sink, facts)
        finally:
            if not visit.ended:
                await self._let_go(visit)

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a control method."""
        self._alive()
        if method == "is_sleeping":
            return self._asleep
        if method == "check_health":
            await self.check_progress(CALL_WAIT_S)
            return True
        if method in ("pause", "sleep"):
            self._awake.clear()
            if method == "sleep" and not self._asleep:
                self._asleep = True
                await self._ask("sleep")
            return True
        if method in ("resume", "wake_up"):
            if self._asleep and method == "wake_up":
                await self._ask("wake_up", device=self.devices.kind)
                self._asleep = False
            if not self._asleep:
                self._awake.set()
            return not self._asleep
        name = {"load_lora": "add_lora", "unload_lora": "remove_lora"}.get(method, method)
        if name not in self.call_methods:
            raise MeshError(Reason.UNSUPPORTED, f"method: {method!r}: the diffusion engine has no such method")
        if name == "list_loras":
            return await self._ask(name)
        adapter = kwargs.get("name", args[0] if args else None)
        if not isinstance(adapter, str):
            raise MeshError(Reason.INVALID_REQUEST, f"{method}: name: {adapter!r}: must name one of lora_modules")
        return await self._ask(name, name=adapter)

    def load(self) -> EngineLoad:
        """How busy it is."""
        running = sum(not visit.ended for visit in self._running.values())
        busy = running > 0 or (len(self._queue) > 0 and self._awake.is_set())
        return EngineLoad(
            running=running,
            waiting=len(self._queue),
            steps=self._steps,
            since_progress_s=time.monotonic() - self._progressed if busy else 0.0,
        )

    async def died(self) -> str:
        """Wait until the child is gone."""
        await self._dead.wait()
        return self._why_dead

    async def check_progress(self, timeout_s: float) -> None:
        """The child answers between two steps."""
        self._alive()
        try:
            await self._ask("ping", timeout_s=timeout_s)
        except TimeoutError:
            raise MeshError(
                Reason.ENGINE_STUCK, f"stage {self.stage.name}: no step ended within {timeout_s:g} s"
            ) from None

    async def stop(self) -> None:
        """End the child."""
        tasks = [task for task in (self._dispatcher, self._gone) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._die("the engine was stopped")
        if self._child is not None:
            await self._child.stop()

    # -------------------------------------------------------------- work
    async def _dispatch(self) -> None:
        """Give the child one batch at a time."""
        while True:
            await self._awake.wait()
            wait_s = self._queue.due(time.monotonic())
            if wait_s != 0.0:
                self._queue_changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._queue_changed.wait(), wait_s)
                continue
            visits = self._queue.take()
            self._running = {visit.number: visit for visit in visits}
            self._job_ended.clear()
            self._progressed = time.monotonic()
            for visit in visits:
                visit.began(self._progressed)
            await self._send(_job(visits))
            await self._job_ended.wait()
            self._running = {}

    async def _let_go(self, visit: Visit) -> None:
        """Stop a request, and wait until nothing works on it."""
        if self._queue.remove(visit) or visit.number not in self._running:
            return
        await self._send(Abort(visit.number))
        with contextlib.suppress(TimeoutError):  # when the step at hand takes longer, the child lets go after it
            await asyncio.wait_for(visit.end.wait(), ABORT_WAIT_S)

    async def _send(self, message: Message) -> None:
        if self._child is None or self._dead.is_set():
            return
        await self._child.send(message)

    async def _ask(self, method: str, *, timeout_s: float = CALL_WAIT_S, **args: Any) -> Any:
        number = next(self._numbers)
        answer = self._results[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(Call(number, method, args))
                return await answer
        finally:
            del self._results[number]

    def _heard(self, message: Message) -> None:
        self._progressed = time.monotonic()
        if isinstance(message, Step):
            self._steps += 1
            for number in message.items:
                if (visit := self._running.get(number)) is not None:
                    visit.step(message.step, message.total, message.arrays.get(str(number)))
        elif isinstance(message, Output):
            if (visit := self._running.get(message.item)) is not None:
                visit.output(message)
        elif isinstance(message, ItemEnded):
            if (visit := self._running.get(message.item)) is not None:
                visit.finish(message)
        elif isinstance(message, JobEnded):
            self._job_ended.set()
        elif isinstance(message, Result):
            self._answered(message)
        elif isinstance(message, Ready) and self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(PipelineFacts(**message.pipeline))
        elif isinstance(message, Failed) and self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(
                EngineConfigError(message.message)
                if message.fatal
                else MeshError(Reason.START_FAILED, message.message, stage=self.stage.name)
            )

    def _answered(self, result: Result) -> None:
        answer = self._results.get(result.call)
        if answer is None or answer.done():
            return  # whoever asked has gone
        if result.error is None:
            answer.set_result(result.value)
        else:
            reason = Reason.INVALID_REQUEST if result.refused else Reason.STAGE_FAILED
            answer.set_exception(MeshError(reason, result.error))

    # -------------------------------------------------------------- death
    def _alive(self) -> PipelineFacts:
        if self._dead.is_set() or self._facts is None:
            raise MeshError(Reason.ENGINE_DEAD, self._why_dead.split("\n", 1)[0] or "the engine has not started")
        return self._facts

    async def _watch(self, child: ChildProcess) -> None:
        await child.ended.wait()
        self._die(child.obituary())

    def _die(self, why: str) -> None:
        if self._dead.is_set():
            return
        self._why_dead = why
        self._dead.set()
        error = MeshError(Reason.ENGINE_DEAD, why.split("\n", 1)[0], stage=self.stage.name)
        for visit in [*self._running.values(), *self._queue.drain()]:
            visit.fail(error)
        for answer in self._results.values():
            if not answer.done():
                answer.set_exception(error)
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(MeshError(Reason.START_FAILED, why, stage=self.stage.name))
        self._job_ended.set()


def _job(visits: Sequence[Visit]) -> Run:
    first = visits[0].request
    return Run(
        items=tuple(
            Item(
                visit.number,
                visit.request.prompt,
                visit.request.negative_prompt,
                visit.request.seeds,
                visit.request.preview_interval if visit.wants_progress else 0,
            )
            for visit in visits
        ),
        call=first.call,
        latents_out=first.latents_out,
        lora=first.lora,
        lora_scale=first.lora_scale,
        arrays=first.arrays,
    )


def _lora(task: EngineTask) -> tuple[str, float] | None:
    lora = task.submit.lora
    if not lora.name:
        return None
    return lora.name, lora.scale if lora.HasField("scale") else 1.0

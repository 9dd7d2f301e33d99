"""The last stage of speak: an engine of our own, which makes the sound of the talker's codes as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from codes import CODES, FIRST_CODE, Code, codes_of
from google.protobuf import json_format
from voice import FRAME, RATE_HZ, Voice

from stagemesh.config import Stage
from stagemesh.rpc.errors import invalid
from stagemesh.tensors import encode
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh_worker.engines import DeviceSet, Engine, EngineConfigError, EngineInput, EngineLoad, EngineTask, TaskSink

PITCH_HZ = 110.0
_LOWEST_HZ, _HIGHEST_HZ = 60.0, 300.0


class Synthesiser(Engine):
    """A formant synthesiser (`voice.py`). Requests may set their own `extra: {pitch_hz: ...}`."""

    name = "synthesiser"
    version = "1"

    def __init__(self, stage: Stage, devices: DeviceSet) -> None:
        super().__init__(stage, devices)
        self._pitch_hz = float(stage.engine_args.get("pitch_hz", PITCH_HZ))
        self._running = 0
        self._codes = 0

    @classmethod
    def check(cls, stage: Stage) -> None:
        """Check `engine_args`: `pitch_hz`, and nothing else."""
        for name, value in stage.engine_args.items():
            if name != "pitch_hz":
                raise EngineConfigError(f"engine_args.{name}: unknown; want pitch_hz")
            if (problem := _pitch_problem(value)) is not None:
                raise EngineConfigError(f"engine_args.pitch_hz: {value!r}: {problem}")

    async def start(self) -> None:
        """There is nothing to load."""

    def probe_input(self, given: EngineInput) -> EngineInput:
        """Two codes of silence: it reads no text."""
        return EngineInput(token_ids=(FIRST_CODE, FIRST_CODE))

    async def run(self, task: EngineTask, sink: TaskSink) -> None:
        """Make the sound of a task's codes, each chunk as it comes. Raises MeshError for what are no codes."""
        utterance = _Utterance(Voice(self._pitch_of(task)), sink)
        self._running += 1
        try:
            sink.started()
            given: EngineInput | None = task.input
            while given is not None:
                codes = _codes(given)
                self._codes += len(codes)
                await utterance.add(codes)
                given = await anext(task.more_input, None) if task.more_input is not None else None
            await utterance.end()
        finally:
            self._running -= 1
        finished = frame_pb.StageFinished(finish_reason=frame_pb.FINISH_REASON_COMPLETE)
        finished.usage.audio_seconds = utterance.samples / RATE_HZ
        sink.finish(finished)

    def _pitch_of(self, task: EngineTask) -> float:
        extra = json_format.MessageToDict(task.submit.params.llm.extra)
        for name, value in extra.items():
            if name != "pitch_hz":
                raise invalid(f"extra.{name}", value, "unknown; want pitch_hz")
            if (problem := _pitch_problem(value)) is not None:
                raise invalid("extra.pitch_hz", value, problem)
        return float(extra.get("pitch_hz", self._pitch_hz))

    def load(self) -> EngineLoad:
        """Utterances that are being spoken; a step is a code."""
        return EngineLoad(running=self._running, steps=self._codes)

    async def died(self) -> str:
        """It has no process that could die without the replica's."""
        await asyncio.Event().wait()
        raise AssertionError

    async def stop(self) -> None:
        """There is nothing to free."""


class _Utterance:
    """One request's sound on its way to the sink. The last code is held back, since the last piece must say so."""

    def __init__(self, voice: Voice, sink: TaskSink) -> None:
        self.samples = 0
        self._voice = voice
        self._sink = sink
        self._held: list[Code] = []

    async def add(self, codes: Sequence[Code]) -> None:
        """Speak these codes, but for the last one."""
        self._held += codes
        now, self._held = self._held[:-1], self._held[-1:]
        if now:
            await self._speak(now, last=False)

    async def end(self) -> None:
        """Nothing follows."""
        if self._held:
            await self._speak(self._held, last=True)

    async def _speak(self, codes: Sequence[Code], *, last: bool) -> None:
        # On a thread: a second of sound takes some 0.05 s, and the replica's event loop has other things to do.
        sound: np.ndarray = await asyncio.to_thread(self._voice.speak, codes)
        await self._sink.ready()
        chunk = frame_pb.AudioChunk(sample_rate_hz=RATE_HZ, offset_samples=self.samples, last=last)
        chunk.samples.inline.CopyFrom(encode(sound))
        self.samples += len(codes) * FRAME
        self._sink.audio(chunk)


def _codes(given: EngineInput) -> list[Code]:
    if given.token_ids is None:
        raise invalid("prompt", given.text or "", "the synthesiser reads the talker's tokens, no text")
    try:
        return codes_of(given.token_ids)
    except ValueError as error:
        raise invalid("prompt.tokens", len(given.token_ids), f"{error}; there are {len(CODES)} codes") from None


def _pitch_problem(value: object) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and _LOWEST_HZ <= value <= _HIGHEST_HZ:
        return None
    return f"want {_LOWEST_HZ:g} to {_HIGHEST_HZ:g}"

"""From a task's wire form to what adapters read: references are fetched, protos become plain values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import numpy as np

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.tensors import encode
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh_worker.adapters import StageInput
from stagemesh_worker.engines.base import EngineInput

MAX_QUEUED_CHUNKS = 1024
"""Chunks of further input a task may have waiting; the head's credit keeps it far below."""


class Resolver(Protocol):
    """Brings tensors here, wherever they are."""

    async def resolve(self, value: tensor_pb.TensorValue) -> Any:
        """The NumPy array of a value; read-only. Raises MeshError (TENSOR_GONE, TENSOR_CORRUPT, UNREACHABLE)."""

    async def resolve_bytes(self, ref: tensor_pb.TensorRef) -> bytes:
        """The bytes of a referenced file. Raises as `resolve`."""


async def read_prompt(prompt: prompt_pb.Prompt, resolver: Resolver) -> EngineInput:
    """A prompt as adapters and engines read it."""
    kind = prompt.WhichOneof("content")
    return EngineInput(
        text=prompt.text if kind == "text" else None,
        messages=tuple({"role": m.role, "content": m.content} for m in prompt.chat.messages)
        if kind == "chat"
        else None,
        token_ids=tuple(prompt.tokens.ids) if kind == "tokens" else None,
        embeds=await resolver.resolve(prompt.embeds) if kind == "embeds" else None,
        negative_text=prompt.negative_text or None,
        media=tuple([await _media_here(item, resolver) for item in prompt.media]),
    )


async def _media_here(item: prompt_pb.MediaInput, resolver: Resolver) -> prompt_pb.MediaInput:
    """The item with its tensor inline, wherever it was."""
    if not item.tensor.HasField("ref"):
        return item
    filled = prompt_pb.MediaInput()
    filled.CopyFrom(item)
    filled.tensor.inline.CopyFrom(encode(await resolver.resolve(item.tensor)))
    return filled


async def read_upstream(output: stage_pb.UpstreamOutput, resolver: Resolver) -> StageInput:
    """One stage's output as adapters read it, with all its bytes here."""
    media = []
    for item in output.media:
        if item.HasField("ref"):
            filled = frame_pb.MediaOutput()
            filled.CopyFrom(item)
            filled.ClearField("ref")
            filled.data = await resolver.resolve_bytes(item.ref)
            item = filled
        media.append(item)
    sound = [await resolver.resolve(chunk.samples) for chunk in output.audio_chunks]
    return StageInput(
        stage=output.stage,
        role=output.role,
        text=output.text,
        token_ids=tuple(output.token_ids),
        media=tuple(media),
        audio=np.concatenate(sound) if sound else None,
        sample_rate_hz=output.audio_chunks[0].sample_rate_hz if output.audio_chunks else 0,
        tensors={item.name: await resolver.resolve(item.value) for item in output.tensors},
        finished=output.finished,
    )


class FurtherInput:
    """The chunks of input that arrive while a task runs."""

    def __init__(self, taken: Callable[[int], None]) -> None:
        """`taken(n)` is called when the engine took n chunks."""
        self._queue: asyncio.Queue[stage_pb.AppendInput] = asyncio.Queue(MAX_QUEUED_CHUNKS)
        self._taken = taken
        self._closed = False

    def append(self, chunk: stage_pb.AppendInput) -> None:
        """A chunk arrived. Raises MeshError when the input is closed or the sender ignores its credit."""
        if self._closed:
            raise MeshError(Reason.INVALID_REQUEST, "input after the chunk that was marked as the last one")
        self._closed = chunk.last
        try:
            self._queue.put_nowait(chunk)
        except asyncio.QueueFull:
            raise MeshError(
                Reason.OVERLOADED, f"more than {MAX_QUEUED_CHUNKS} chunks of input wait: credit was not respected"
            ) from None

    async def chunks(self) -> AsyncIterator[stage_pb.AppendInput]:
        """All chunks in order, up to and including the last one."""
        while True:
            chunk = await self._queue.get()
            self._taken(1)
            yield chunk
            if chunk.last:
                return

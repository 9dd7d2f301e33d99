"""Requests whose prompt goes on while their output comes."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from stagemesh import AsyncClient, Client, Finished, InvalidRequest, TextDelta
from tests.unit.client.scripted_head import ScriptedHead, whole_answer

Head = Callable[..., ScriptedHead]


def test_later_chunks_go_out_while_the_answer_to_earlier_ones_comes(head: Head) -> None:
    said: queue.Queue[str] = queue.Queue()

    def chunks() -> Iterator[str]:
        yield "one"
        yield "after " + said.get(timeout=10)  # only the head's answer lets the prompt go on

    with Client(head(whole_answer).address) as client:
        frames = []
        for frame in client.generate_interactive(chunks(), request_id="mine"):
            frames.append(frame)
            if isinstance(frame, TextDelta):
                said.put(frame.text)
    assert [frame.text for frame in frames if isinstance(frame, TextDelta)] == ["[one]", "[after [one]]"]
    assert isinstance(frames[-1], Finished) and frames[-1].request_id == "mine"


async def test_the_async_client_does_the_same(head: Head) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()

    async def chunks() -> AsyncIterator[str]:
        yield "one"
        yield "after " + await said.get()

    texts = []
    async with AsyncClient(head(whole_answer).address) as client:
        async for frame in client.generate_interactive(chunks()):
            if isinstance(frame, TextDelta):
                texts.append(frame.text)
                said.put_nowait(frame.text)
    assert texts == ["[one]", "[after [one]]"]


async def test_a_failing_prompt_ends_the_request_with_its_own_error(head: Head) -> None:
    scripted, answered = head(whole_answer), asyncio.Event()

    async def chunks() -> AsyncIterator[str]:
        yield "one"
        await answered.wait()  # so that the head has the call
        raise LookupError("the microphone is gone")

    async with AsyncClient(scripted.address) as client:
        with pytest.raises(LookupError, match="microphone"):
            async for _ in client.generate_interactive(chunks()):
                answered.set()
    assert await asyncio.to_thread(scripted.cancelled.wait, 5)


def test_a_prompt_without_chunks_is_refused(head: Head) -> None:
    with Client(head(whole_answer).address) as client, pytest.raises(InvalidRequest, match="begins with its first"):
        client.generate_interactive([])

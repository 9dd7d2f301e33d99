"""A scripted head, and both clients behind one face, so that each behaviour is tested on each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stagemesh import AsyncClient, Client, Frame
from tests.unit.client.scripted_head import Script, ScriptedHead


@pytest.fixture
def head() -> Iterator[Callable[..., ScriptedHead]]:
    """Starts scripted heads, and stops them."""
    started: list[ScriptedHead] = []

    def start(*scripts: Script, port: int = 0) -> ScriptedHead:
        started.append(ScriptedHead(*scripts, port=port))
        return started[-1]

    yield start
    for one in started:
        one.stop()


Generate = Callable[..., list[Frame]]


@pytest.fixture(params=["sync", "async"])
def generate(request: pytest.FixtureRequest) -> Generate:
    """`generate(address, prompt, client={...}, take=N, **arguments)`: the frames, from the client under test."""

    def sync(
        address: str, prompt: Any = "a wish", *, client: dict[str, Any] | None = None, take: int = 0, **arguments: Any
    ) -> list[Frame]:
        frames: list[Frame] = []
        with Client(address, **(client or {})) as opened:
            for frame in opened.generate(prompt, **arguments):
                frames.append(frame)
                if len(frames) == take:
                    break
        return frames

    def aio(
        address: str, prompt: Any = "a wish", *, client: dict[str, Any] | None = None, take: int = 0, **arguments: Any
    ) -> list[Frame]:
        async def run() -> list[Frame]:
            frames: list[Frame] = []
            async with AsyncClient(address, **(client or {})) as opened:
                async for frame in opened.generate(prompt, **arguments):
                    frames.append(frame)
                    if len(frames) == take:
                        break
            return frames

        return asyncio.run(run())

    return sync if request.param == "sync" else aio

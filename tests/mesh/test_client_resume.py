"""A head that is killed and started again is a pause to whoever uses the Python client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh import AsyncClient, Client, Finished, Frame, Image, StageFinished, TextDelta
from tests.mesh.faults.processes import READY_S, Process, Processes, processes
from tests.mesh.processes import PIPELINE

SAMPLING = {"writer": {"max_tokens": 60, "temperature": 0}, "painter": {"seed": 7, "num_inference_steps": 3}}


class Mesh:
    """A head that can be killed and started again at its address, and a node."""

    def __init__(self, running: Processes) -> None:
        self._processes = running
        self._head: Process = running.start_head()
        running.start_worker("a")
        running.ready(2)

    @property
    def address(self) -> str:
        return self._processes.address

    def replace_head(self) -> None:
        self._head.kill()
        self._head = self._processes.start_head()


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    with processes(tmp_path, PIPELINE.format(pace=30)) as running:
        yield Mesh(running)


def text(frames: list[Frame]) -> str:
    return "".join(frame.text for frame in frames if isinstance(frame, TextDelta))


def pictures(frames: list[Frame]) -> list[bytes]:
    return [frame.data for frame in frames if isinstance(frame, Image)]


def test_a_killed_head_is_a_pause(mesh: Mesh) -> None:
    with Client(mesh.address) as client:
        undisturbed = list(client.generate("a wish", sampling=SAMPLING))
        frames: list[Frame] = []
        for frame in client.generate("a wish", sampling=SAMPLING):
            frames.append(frame)
            if len(frames) == 10:
                mesh.replace_head()
    assert text(frames) == text(undisturbed) != ""
    assert pictures(frames) == pictures(undisturbed) != []
    tokens = [token for frame in frames if isinstance(frame, TextDelta) for token in frame.token_ids]
    assert len(tokens) == 60
    assert [frame.sequence for frame in frames] == sorted({frame.sequence for frame in frames})
    assert isinstance(frames[-1], Finished)
    (writer,) = [frame for frame in frames if isinstance(frame, StageFinished) and frame.stage == "writer"]
    assert writer.recovery == "exact"


async def test_many_streams_of_the_async_client_survive_a_killed_head(mesh: Mesh) -> None:
    wishes = [f"wish {number}" for number in range(8)]
    is_under_way = asyncio.Semaphore(0)

    async def run(client: AsyncClient, wish: str) -> list[Frame]:
        frames: list[Frame] = []
        async for frame in client.generate(wish, sampling=SAMPLING):
            frames.append(frame)
            if len(frames) == 5:
                is_under_way.release()
        return frames

    async with AsyncClient(mesh.address) as client:
        undisturbed = await asyncio.gather(*(run(client, wish) for wish in wishes))
        for _ in wishes:
            await is_under_way.acquire()
        running = [asyncio.create_task(run(client, wish)) for wish in wishes]
        for _ in wishes:
            await asyncio.wait_for(is_under_way.acquire(), READY_S)
        await asyncio.to_thread(mesh.replace_head)
        survived = await asyncio.wait_for(asyncio.gather(*running), READY_S)
    for before, after in zip(undisturbed, survived, strict=True):
        assert text(after) == text(before)
        assert pictures(after) == pictures(before)

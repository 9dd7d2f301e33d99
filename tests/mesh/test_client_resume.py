"""A head that is killed and started again is a pause to whoever uses the Python client."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh import AsyncClient, Client, Finished, Frame, Image, StageFinished, TextDelta
from stagemesh.client.admin import AdminClient
from stagemesh.v1 import replica_pb2 as replica_pb
from tests.mesh.processes import PATIENCE_S, await_file, eventually, start, write_pipeline

SAMPLING = {"writer": {"max_tokens": 60, "temperature": 0}, "painter": {"seed": 7, "num_inference_steps": 3}}


class Mesh:
    """A head that can be killed and started again at its address, and a node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pipeline = write_pipeline(folder, pace=30)
        self.address = "127.0.0.1:0"
        self._starts = 0
        self.head = self.start_head()
        self._node = start(folder, "worker", "--head", self.address, "--node-id", "a")
        self.await_ready()

    def start_head(self) -> subprocess.Popen[str]:
        self._starts += 1
        ready = self._folder / f"head-{self._starts}"
        self.head = start(
            self._folder, "head", str(self._pipeline), "--listen", self.address, "--ready-file", str(ready)
        )
        self.address = await_file(ready, self.head)
        return self.head

    def await_ready(self) -> None:
        with AdminClient(self.address) as admin:
            eventually(lambda: self._ready_replicas(admin) == 2)

    @staticmethod
    def _ready_replicas(admin: AdminClient) -> int:
        return sum(row.state == replica_pb.REPLICA_STATE_READY for row in admin.list_replicas()[0])

    def replace_head(self) -> None:
        self.head.kill()
        self.head.communicate(timeout=PATIENCE_S)
        self.start_head()

    def stop(self) -> None:
        for process in (self._node, self.head):
            process.terminate()
        for process in (self._node, self.head):
            process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    mesh = Mesh(tmp_path)
    yield mesh
    mesh.stop()


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
            await asyncio.wait_for(is_under_way.acquire(), PATIENCE_S)
        await asyncio.to_thread(mesh.replace_head)
        survived = await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)
    for before, after in zip(undisturbed, survived, strict=True):
        assert text(after) == text(before)
        assert pictures(after) == pictures(before)

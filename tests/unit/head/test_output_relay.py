"""What a head brings from replicas to clients is bounded, and let go of however a fetch ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.server import bind, create_server
from stagemesh.tensors import TensorServicer, TensorStore
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh_head.links import outputs
from stagemesh_head.links.outputs import OutputRelay

ARRAY = np.arange(4 << 20, dtype=np.float32)
DEADLINE_S = 30.0


class Owner:
    """A replica's tensor store on a port, and the relay before it."""

    def __init__(self) -> None:
        self.store = TensorStore(host_id="", incarnation="one")
        self.server = create_server()
        TensorServicer(self.store).add_to_server(self.server)
        self.endpoint = f"127.0.0.1:{bind(self.server, '127.0.0.1:0')}"
        links: Any = SimpleNamespace(links=lambda: [SimpleNamespace(incarnation="one", endpoint=self.endpoint)])
        self.relay = OutputRelay(links)
        self.request = inference_pb.FetchOutputRequest(ref=self.store.put("r", ARRAY).ref)


@pytest_asyncio.fixture
async def owner() -> AsyncIterator[Owner]:
    owner = Owner()
    await owner.server.start()
    yield owner
    await owner.server.stop(None)
    owner.store.close()


async def test_all_chunks_go_through_in_order_and_from_an_offset_on(owner: Owner) -> None:
    chunks: list[inference_pb.FetchOutputResponse] = []

    async def write(chunk: inference_pb.FetchOutputResponse) -> None:
        chunks.append(chunk)

    await owner.relay.send(owner.request, write)
    assert b"".join(chunk.data for chunk in chunks) == ARRAY.tobytes() and chunks[-1].HasField("crc32")
    chunks.clear()
    owner.request.offset_bytes = ARRAY.nbytes - 12
    await owner.relay.send(owner.request, write)
    assert b"".join(chunk.data for chunk in chunks) == ARRAY.tobytes()[-12:]
    assert owner.relay.running == 0


async def test_a_client_that_leaves_ends_its_fetch(owner: Owner) -> None:
    began = asyncio.Event()

    async def write(chunk: inference_pb.FetchOutputResponse) -> None:
        began.set()
        await asyncio.Event().wait()

    fetch = asyncio.create_task(owner.relay.send(owner.request, write))
    async with asyncio.timeout(DEADLINE_S):
        await began.wait()
        assert owner.relay.running == 1
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
    assert owner.relay.running == 0


async def test_a_client_that_stops_reading_is_given_up(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "PROGRESS_S", 0.2)

    async def write(chunk: inference_pb.FetchOutputResponse) -> None:
        await asyncio.Event().wait()

    with pytest.raises(MeshError, match=r"nothing went through for 0\.2 s") as caught:
        await asyncio.wait_for(owner.relay.send(owner.request, write), DEADLINE_S)
    assert caught.value.reason is Reason.REQUEST_TIMEOUT and owner.relay.running == 0


async def test_beyond_the_bound_a_fetch_is_refused_with_a_delay(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "MAX_FETCHES", 2)
    began, held = asyncio.Semaphore(0), asyncio.Event()

    async def write(chunk: inference_pb.FetchOutputResponse) -> None:
        began.release()
        await held.wait()

    running = [asyncio.create_task(owner.relay.send(owner.request, write)) for _ in range(2)]
    async with asyncio.timeout(DEADLINE_S):
        for _ in running:
            await began.acquire()
        with pytest.raises(MeshError) as caught:
            await owner.relay.send(owner.request, write)
        assert caught.value.reason is Reason.OVERLOADED and caught.value.retry_delay_s
        held.set()
        await asyncio.gather(*running)
    assert owner.relay.running == 0


async def test_a_replica_that_ends_meanwhile_is_an_error_that_may_be_retried(owner: Owner) -> None:
    async def write(chunk: inference_pb.FetchOutputResponse) -> None:
        await owner.server.stop(None)

    with pytest.raises(MeshError) as caught:
        await asyncio.wait_for(owner.relay.send(owner.request, write), DEADLINE_S)
    assert caught.value.retryable, caught.value
    assert owner.relay.running == 0

"""What a program sees of a client that it closes, while somebody reads and afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from stagemesh import AsyncClient, Client, RequestAborted
from stagemesh.client.admin import AdminClient
from stagemesh.v1 import inference_pb2 as inference_pb
from tests.unit.client.scripted_head import ScriptedHead, text, whole_answer

Head = Callable[..., ScriptedHead]


def hangs(
    request: inference_pb.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[inference_pb.GenerateResponse]:
    """One token, and nothing more until the client leaves."""
    left = threading.Event()
    context.add_callback(left.set)
    yield text(request, 1, "a", 1)
    left.wait(20)


def test_reader_in_another_thread_is_told_that_the_client_was_closed(head: Head) -> None:
    client = Client(head(hangs).address)
    stream = client.generate("a wish", timeout=20)
    next(stream)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(next, stream)
        client.close()
        with pytest.raises(RequestAborted, match="this client was closed"):
            reading.result(10)


def test_calls_on_a_closed_client_say_so(head: Head) -> None:
    client = Client(head(whole_answer).address)
    client.close()
    for call in (
        client.list_pipelines,
        client.get_pipeline,
        lambda: client.abort("r"),
        lambda: list(client.generate("a wish")),
        lambda: list(client.generate_interactive(["a wish"])),
    ):
        with pytest.raises(RequestAborted, match="this client was closed"):
            call()
    admin = AdminClient("127.0.0.1:1")
    admin.close()
    with pytest.raises(RequestAborted, match="this client was closed"):
        admin.list_nodes()


async def test_closing_an_async_client_cancels_calls_and_no_tasks(head: Head) -> None:
    """gRPC alone would have the reader's task cancelled, which its program asked nobody for."""
    client = AsyncClient(head(hangs).address)
    stream = client.generate("a wish", timeout=20)
    await anext(stream)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(RequestAborted, match="this client was closed"):
        async with asyncio.timeout(10):
            await reading


async def test_cancelled_reader_stays_cancelled_when_the_client_closes_too(head: Head) -> None:
    client = AsyncClient(head(hangs).address)
    stream = client.generate("a wish", timeout=20)
    await anext(stream)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reading.cancel()
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await reading

"""R14 on vLLM: control calls reach the engine, and requests go on beside them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf import json_format
from replica_harness import HeadLink, Replica

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import open_channel
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import stage_pb2_grpc as stage_grpc

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

LONG = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}
Call = Callable[..., Awaitable[Any]]


@pytest_asyncio.fixture(loop_scope="module")
async def call(llama: Replica) -> AsyncIterator[Call]:
    """`await call(method, *args, **kwargs)`: what the engine answers."""
    async with open_channel(llama.endpoint) as channel:

        async def call(method: str, *args: Any, deadline_s: float = 30, **kwargs: Any) -> Any:
            request = stage_pb.CallRequest(method=method)
            json_format.ParseDict(list(args), request.args)
            json_format.ParseDict(kwargs, request.kwargs)
            answer = await stage_grpc.StageServiceStub(channel).Call(request, timeout=deadline_s)
            return json_format.MessageToDict(answer.result)

        yield call


async def test_R14_control_calls_reach_the_engine(call: Call) -> None:
    assert await call("check_health") is True
    assert await call("reset_prefix_cache") is True
    await call("reset_mm_cache")
    assert await call("is_sleeping") is False
    await call("pause", mode="keep")
    assert await call("is_paused") is True
    await call("resume")
    assert await call("is_paused") is False
    # The operator's own, a method of the engine's workers: a result of each.
    assert await call("get_supported_tasks") == [["generate"]]
    for method, args, reason in (
        ("shutdown", (), Reason.METHOD_NOT_ALLOWED),
        ("collective_rpc", ("exec",), Reason.METHOD_NOT_ALLOWED),
        ("sleep", ("much", "too", "many", "arguments"), Reason.INVALID_REQUEST),
        ("add_lora", ("cartoon",), Reason.INVALID_REQUEST),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(method, *args)
        assert MeshError.from_rpc_error(caught.value).reason == reason


async def test_R14_a_long_control_call_holds_up_no_request_and_no_abort(link: HeadLink, call: Call) -> None:
    await link.submit(1, "a red circle", llm=LONG)
    await link.submit(2, "a green square", llm=LONG)
    await link.until(lambda link: bool(link.token_ids(1) and link.token_ids(2)))
    # It takes as long as the requests that run.
    pause = asyncio.ensure_future(call("pause", mode="wait", clear_cache=False, deadline_s=60))
    await asyncio.sleep(0.05)
    seen = len(link.token_ids(1))
    assert not pause.done()
    await link.send(aborts=[stage_pb.AbortTask(slot=2)])
    async with asyncio.timeout(2):
        assert (await link.end_of(2)).HasField("aborted")
    assert (await link.end_of(1)).HasField("finished")
    assert seen < len(link.token_ids(1)) == 200
    await pause
    await call("resume")
    await link.submit(3, "a red circle", llm=LONG | {"max_tokens": 40})
    assert (await link.end_of(3)).HasField("finished")
    assert len(link.token_ids(3)) == 40


async def test_running_requests_wait_out_a_pause(link: HeadLink, call: Call) -> None:
    await link.submit(1, "a red circle", llm=LONG)
    assert (await link.end_of(1)).HasField("finished")
    await link.submit(2, "a red circle", llm=LONG)
    await call("pause", mode="keep", clear_cache=False)
    await call("resume")
    async with asyncio.timeout(30):
        await link.end_of(2)
    assert link.token_ids(2) == link.token_ids(1)

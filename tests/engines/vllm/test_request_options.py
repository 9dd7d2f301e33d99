"""R15 on vLLM: what a request says beside its prompt, told by what the engine does with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import tiny_llama
from google.protobuf import json_format
from replica_harness import HeadLink, StartReplica, submit

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

START_S = 240.0
GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
BLOCK = 32
"""Tokens of a block of the prefix cache."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def link(
    start_replica: StartReplica, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[HeadLink]:
    """To a model that thinks before it answers, in an engine with one place and a queue in order of priority."""
    model = tiny_llama.make(tmp_path_factory.mktemp("thinker"), ("<think>", "</think>"))
    replica = await start_replica(
        engine="vllm",
        model=str(model),
        engine_args={
            "max_model_len": 256, "max_num_seqs": 1, "block_size": BLOCK, "scheduling_policy": "priority",
            "structured_outputs_config": {"reasoning_parser": "deepseek_r1"},
        },
    )  # fmt: skip
    await replica.ready(START_S)
    link = await replica.link()
    yield link
    await link.close()


async def _finished(link: HeadLink, task: stage_pb.SubmitTask) -> frame_pb.StageFinished:
    await link.send(submits=[task])
    event = await link.end_of(task.slot)
    assert event.HasField("finished"), event
    return event.finished


async def test_R15_the_smallest_priority_is_served_first(link: HeadLink) -> None:
    await link.submit(1, "a red circle", llm=GREEDY | {"max_tokens": 120})
    await link.until(lambda link: bool(link.token_ids(1)))
    priorities = {2: 5, 3: 0, 4: -5}
    await link.send(submits=[submit(slot, "a wish", llm=GREEDY, priority=at) for slot, at in priorities.items()])
    for slot in (1, *priorities):
        await link.end_of(slot)
    ends = [event.slot for response in link.responses for event in response.events if event.HasField("finished")]
    served = [slot for slot in ends if slot in priorities]
    assert served == [4, 3, 2]


async def test_R15_a_cache_salt_keeps_cached_prompts_apart(link: HeadLink) -> None:
    prompt = "the quick brown fox jumps over the lazy dog, and a small green square is drawn with great care " * 2

    async def cached(slot: int, salt: str) -> int:
        finished = await _finished(link, submit(slot, prompt, llm=GREEDY, cache_salt=salt))
        return finished.usage.cached_tokens

    assert await cached(11, "one tenant") == 0
    assert await cached(12, "one tenant") >= BLOCK
    assert await cached(13, "another tenant") == 0
    assert await cached(14, "") == 0


async def test_R15_the_engine_refuses_a_data_parallel_rank_that_it_has_not(link: HeadLink) -> None:
    await _finished(link, submit(21, "a red circle", llm=GREEDY, data_parallel_rank=0))
    await link.send(submits=[submit(22, "a red circle", llm=GREEDY, data_parallel_rank=1)])
    error = MeshError.from_status((await link.end_of(22)).failed)
    assert error.reason == Reason.INVALID_REQUEST
    assert "rank" in error.message


async def test_R15_reasoning_that_has_ended_puts_the_answer_into_its_form_at_once(link: HeadLink) -> None:
    def task(slot: int, **fields: Any) -> stage_pb.SubmitTask:
        asked = submit(slot, "a red circle", llm={"temperature": 0.0, "max_tokens": 40}, **fields)
        json_format.ParseDict({"choice": {"choices": ["red", "green"]}}, asked.params.llm.structured_outputs)
        return asked

    await _finished(link, task(31))
    assert link.text(31) not in ("red", "green"), "it still thinks, in any form"
    await _finished(link, task(32, reasoning_ended=True))
    assert link.text(32) in ("red", "green")


async def test_R15_streaming_input_refuses_what_vllm_cannot_be_told(link: HeadLink) -> None:
    task = submit(41, "a red circle", llm=GREEDY, reasoning_ended=True, more_input=True)
    await link.send(submits=[task])
    error = MeshError.from_status((await link.end_of(41)).failed)
    assert (error.reason, "reasoning_ended" in error.message) == (Reason.UNSUPPORTED, True)

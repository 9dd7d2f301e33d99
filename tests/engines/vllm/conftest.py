"""One real vLLM replica for the tests of a module; a start takes 10 to 40 seconds."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "worker" / "replica"))

from replica_harness import HeadLink, Replica, StartReplica, replicas

START_S = 240.0


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random-weights Llama with a byte-level tokenizer and a chat template."""
    import tiny_llama

    return tiny_llama.make(tmp_path_factory.mktemp("tiny-llama"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def start_replica() -> AsyncIterator[StartReplica]:
    """Spawns replicas that live as long as the module's tests."""
    async with replicas() as start:
        yield start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llama(start_replica: StartReplica, tiny_llama: Path) -> Replica:
    """A replica of the tiny Llama."""
    replica = await start_replica(
        engine="vllm",
        model=str(tiny_llama),
        engine_args={"max_model_len": 256, "max_num_seqs": 64, "enable_prompt_embeds": True},
        control_methods=["get_supported_tasks"],
    )
    return await replica.ready(START_S)


@pytest_asyncio.fixture(loop_scope="module")
async def link(llama: Replica) -> AsyncIterator[HeadLink]:
    """A head's link to it, anew for each test."""
    link = await llama.link()
    yield link
    await link.close()

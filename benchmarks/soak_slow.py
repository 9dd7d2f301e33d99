"""Requests that stream through an edge whose consumer is ten times slower than its producer.

Without credit the producer would run ahead by nearly all of its output, and everything would pile up in the head and
in the consumer. Beside them plain requests go through the same head and the same producer: they must not be slower
than without the others.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from pathlib import Path

from soak_leftovers import Census

from stagemesh import TextDelta
from stagemesh.client.aio import AsyncClient
from tests.mesh.faults.processes import processes

RATE = 200.0
"""Tokens a second of the thinker."""
SLOWER = 10
PIPELINE = """
name: soak
stages:
- name: thinker
  engine: synthetic
  final_output: true
  engine_args: {{tokens: {tokens}, tokens_per_second: {rate}}}
  runtime: {{shared_devices: true}}
- name: talker
  engine: synthetic
  inputs: [thinker]
  edge: stream
  final_output: true
  engine_args: {{tokens: 2, tokens_per_second: {slow}}}
  runtime: {{shared_devices: true}}
"""
WINDOW = 64
"""Tokens that an edge allows on their way (orchestration/edges.py)."""
ROUNDING = 16
"""Further ones that may be seen: what the client's own messages hold, and a merged chunk."""
PLAIN = 8
PLAIN_TOKENS = 50
SLOWED = 1.5
"""Times as slow as without the others, and the machine is busy with them: more than that is harm."""


def add_to(soaks: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """The command."""
    parser = soaks.add_parser("slow")
    parser.add_argument("--requests", type=int, default=64, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of the producer, each request")
    parser.set_defaults(run=run)


async def run(folder: Path, options: argparse.Namespace) -> list[str]:
    """Run it. Returns what is wrong."""
    text = PIPELINE.format(tokens=options.tokens, rate=RATE, slow=RATE / SLOWER)
    with processes(folder, text) as mesh:
        head = mesh.start_head()
        mesh.start_worker("a")
        mesh.ready(2)
        async with AsyncClient(mesh.address) as client:
            return await Slow(client, Census(mesh, head.pid), options.requests, options.tokens).run()


class Flow:
    """What one slowed request has brought so far."""

    def __init__(self) -> None:
        self.tokens = Counter[str]()
        self.lead = 0
        """Most tokens by which the thinker was ahead of what the talker had read."""
        self.finished = ""

    def take(self, frame: TextDelta) -> None:
        """A frame of either stage. The talker says two tokens a chunk, and a chunk is at least one of the thinker's."""
        self.tokens[frame.stage] += len(frame.token_ids)


class Slow:
    """One run."""

    def __init__(self, client: AsyncClient, census: Census, requests: int, tokens: int) -> None:
        self._client, self._census = client, census
        self._flows = [Flow() for _ in range(requests)]
        self._tokens = tokens

    async def run(self) -> list[str]:
        """Plain requests alone, then beside the slow ones; samples of memory all along."""
        alone = [await self._plain() for _ in range(3)]
        before = self._census.sizes()
        started = time.monotonic()
        work = asyncio.gather(*(self._slow(number, flow) for number, flow in enumerate(self._flows)))
        beside, made, sizes = [], [], [before]
        while not work.done():
            beside.append(await self._plain())
            sizes.append(self._census.sizes())
            made.append((time.monotonic() - started, sum(flow.tokens["thinker"] for flow in self._flows)))
            await asyncio.sleep(0.5)
        await work
        seconds = time.monotonic() - started
        left = await self._census.settled()
        return self._judge(alone, beside, made, sizes, seconds) + ([] if left.is_clean else [f"left behind: {left}"])

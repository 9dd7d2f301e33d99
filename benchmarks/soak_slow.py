"""Requests that stream through an edge whose consumer is ten times slower than its producer.

Without credit the producer would be done after a tenth of the time, and its output would pile up in the head and in
the consumer. Beside them plain requests go through the same head and the same producer: those must not be held up.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from soak_leftovers import Census, Sizes

from stagemesh import StageFinished, TextDelta
from stagemesh.client.aio import AsyncClient
from tests.mesh.faults.processes import processes

RATE = 200.0
"""Tokens a second of the thinker, each request."""
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
"""Tokens by which the thinker may be ahead (orchestration/edges.py)."""
HELD_BACK = 0.85
"""Share of the time in which the talker reads all but the last window, that the thinker must at least have taken."""
PLAIN_TOKENS = 50
SLOWED = 2.0
"""Plain requests may take so many times as long as alone: the machine has more to do meanwhile."""
GROWTH_MIB = 32.0
"""Of any process; what all requests together say is a few MiB."""


def add_to(soaks: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """The command."""
    parser = soaks.add_parser("slow")
    parser.add_argument("--requests", type=int, default=64, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of the producer, each request")
    parser.set_defaults(run=run)


def pipeline(tokens: int) -> str:
    """The pipeline, with so many tokens of the producer for each request."""
    return PIPELINE.format(tokens=tokens, rate=RATE, slow=RATE / SLOWER)


async def run(folder: Path, options: argparse.Namespace) -> list[str]:
    """Run it. Returns what is wrong."""
    with processes(folder, pipeline(options.tokens)) as mesh:
        head = mesh.start_head()
        mesh.start_worker("a")
        mesh.ready(2)
        async with AsyncClient(mesh.address) as client:
            slow = Slow(client, Census(mesh, head.pid), options.requests, options.tokens)
            return [*await slow.run(), *slow.slowed()]


@dataclass(slots=True)
class Flow:
    """What one slowed request has brought; times in seconds from its start."""

    thought: int = 0
    said: int = 0
    thought_all_at: float = 0.0
    said_all_at: float = 0.0


class Slow:
    """One run."""

    def __init__(self, client: AsyncClient, census: Census, requests: int, tokens: int) -> None:
        self._client, self._census, self._tokens = client, census, tokens
        self._flows = [Flow() for _ in range(requests)]
        self._alone: list[float] = []
        self._beside: list[float] = []
        """Seconds of plain requests."""

    async def run(self) -> list[str]:
        """Plain requests alone, then beside the slow ones; memory is looked at all along."""
        self._alone = [await self._plain() for _ in range(5)]
        sizes = [self._census.sizes()]
        work = asyncio.gather(*(self._slow(number, flow) for number, flow in enumerate(self._flows)))
        while not work.done():
            self._beside.append(await self._plain())
            sizes.append(self._census.sizes())
        await work
        left = await self._census.settled()
        return [*self._judge_flows(), *growth(sizes), *([] if left.is_clean else [f"left behind: {left}"])]

    def slowed(self) -> list[str]:
        """Whether plain requests took longer beside the slow ones."""
        alone, beside = statistics.median(self._alone), statistics.median(self._beside)
        print(f"plain requests: {alone:.3f} s alone, {beside:.3f} s beside (median of {len(self._beside)})")
        if beside > SLOWED * alone:
            return [f"plain requests take {beside / alone:.1f} times as long beside the slow ones"]
        return []

    async def _plain(self) -> float:
        """Seconds of a request that ends with the thinker."""
        started = time.monotonic()
        sampling = {"thinker": {"max_tokens": PLAIN_TOKENS}}
        async for _ in self._client.generate("plain", outputs="thinker", sampling=sampling):
            pass
        return time.monotonic() - started

    async def _slow(self, number: int, flow: Flow) -> None:
        started = time.monotonic()
        async for frame in self._client.generate(f"slow {number}"):
            now = time.monotonic() - started
            if isinstance(frame, TextDelta) and frame.stage == "thinker":
                flow.thought += len(frame.token_ids)
            elif isinstance(frame, TextDelta):
                flow.said += len(frame.token_ids)
            elif isinstance(frame, StageFinished) and frame.stage == "thinker":
                flow.thought_all_at = now
            elif isinstance(frame, StageFinished):
                flow.said_all_at = now

    def _judge_flows(self) -> list[str]:
        wrong, flows = [], self._flows
        share = min(flow.thought_all_at / flow.said_all_at for flow in flows)
        thought = statistics.median(flow.thought_all_at for flow in flows)
        said = statistics.median(flow.said_all_at for flow in flows)
        print(f"{len(flows)} requests, {self._tokens} tokens each at {RATE:g} a second, consumer {SLOWER} times slower")
        print(f"the producer alone would take {self._tokens / RATE:.1f} s; it took {thought:.1f} s, all {said:.1f} s")
        if lost := [flow for flow in flows if flow.thought != self._tokens or flow.said < 2]:
            wrong.append(f"{len(lost)} requests lack output, such as {lost[0]}")
        if share < HELD_BACK * (1 - WINDOW / self._tokens):
            wrong.append(f"a producer was done after {share:.0%} of its consumer's time: it was not held back")
        return wrong


def growth(sizes: list[Sizes]) -> list[str]:
    """What grew by more than requests need; prints a table."""
    wrong = []
    for name, size in sizes[0].mib.items():
        most = max(sample.mib[name] for sample in sizes)
        print(f"| {name} | {size:.1f} MiB | {most:.1f} MiB at most |")
        if most - size > GROWTH_MIB:
            wrong.append(f"{name} grew by {most - size:.1f} MiB")
    return wrong

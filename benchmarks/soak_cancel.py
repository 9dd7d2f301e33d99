"""Requests that are stopped at random moments, many at a time: by their client's leaving, or by AbortRequest.

The pipeline has what a stop can meet: a stream edge, an edge that waits for the whole, tensors by reference, a picture.
A stop may come before the first frame, between stages, together with the end, or after it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections import Counter
from pathlib import Path

from soak_leftovers import Census, Sizes

from stagemesh import Finished, StageMeshError
from stagemesh.client.aio import AsyncClient
from tests.mesh.faults.processes import Processes, processes

PIPELINE = """
name: soak
stages:
- name: writer
  engine: synthetic
  final_output: true
  engine_args: {tokens: 12, tokens_per_second: 400}
  runtime: {shared_devices: true}
- name: speaker
  engine: synthetic
  inputs: [writer]
  edge: stream
  final_output: true
  engine_args: {tokens: 2, tokens_per_second: 1000}
  runtime: {shared_devices: true}
- name: sketcher
  stage_type: diffusion
  engine: synthetic
  inputs: [writer]
  final_output_type: latent
  engine_args: {tensor_shape: [128, 256]}
  runtime: {shared_devices: true}
- name: painter
  stage_type: diffusion
  engine: synthetic
  inputs: [sketcher]
  final_output: true
  runtime: {shared_devices: true}
"""
STAGES = 4
SEED = 1
HANG_S = 30.0
"""No request takes a second: one that takes so long hangs."""
SAMPLES = 5
FLAT_MIB = 3.0
"""What resident memory may grow by between the first sample and the last: an allocator's noise, 0.6 KiB a request."""


def add_to(soaks: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """The two commands."""
    for name, rounds, run in (("cancel", 10_000, race), ("storm", 5_000, storm)):
        parser = soaks.add_parser(name)
        parser.add_argument("--rounds", type=int, default=rounds, help="requests")
        parser.add_argument("--at-once", type=int, default=32, help="requests at a time")
        parser.set_defaults(run=run)


async def race(folder: Path, options: argparse.Namespace) -> list[str]:
    """Stop at any moment up to a little after the end. Returns what is wrong."""
    return await _run(folder, options, latest=1.3)


async def storm(folder: Path, options: argparse.Namespace) -> list[str]:
    """Stop all well before their end. Returns what is wrong."""
    return await _run(folder, options, latest=0.6)


async def _run(folder: Path, options: argparse.Namespace, latest: float) -> list[str]:
    with processes(folder, PIPELINE) as mesh:
        head = mesh.start_head()
        mesh.start_worker("a")
        mesh.ready(STAGES)
        race = Race(mesh, Census(mesh, head.pid), latest, rounds=options.rounds, at_once=options.at_once)
        return [*await race.run(), *growth(race.samples)]


class Race:
    """The requests of one run."""

    def __init__(self, mesh: Processes, census: Census, latest: float, *, rounds: int, at_once: int) -> None:
        """Args: latest: when a stop may come at the latest, in times a request takes undisturbed."""
        self._mesh, self._census, self._latest = mesh, census, latest
        self._rounds, self._at_once = rounds, at_once
        self.samples: list[Sizes] = []
        self._random = random.Random(SEED)
        self._outcomes: Counter[str] = Counter()
        self._took = 0.0
        self._wrong: list[str] = []

    async def run(self) -> list[str]:
        """All of them; prints a line at each sample of memory."""
        async with AsyncClient(self._mesh.address, max_retries=0, resume_window=0) as client:
            self._took = await self._undisturbed(client)
            # What is allocated once, such as buffers of connections, is no leak.
            await self._many(client, self._rounds // 5)
            await self._census.settled()
            self._outcomes.clear()
            self.samples.append(self._census.sizes())
            print(f"a request takes {self._took:.3f} s, {self._at_once} at a time; {self.samples[0]}", flush=True)
            for number in range(1, SAMPLES + 1):
                started = time.monotonic()
                await self._many(client, self._rounds // SAMPLES)
                rate = self._rounds // SAMPLES / (time.monotonic() - started)
                left = await self._census.settled()
                self.samples.append(sizes := self._census.sizes())
                print(f"{number * self._rounds // SAMPLES} stopped, {rate:.0f}/s: {left}; {sizes}", flush=True)
                if not left.is_clean:
                    self._wrong.append(f"left behind: {left}")
        print(", ".join(f"{name} {count}" for name, count in sorted(self._outcomes.items())))
        self._wrong += [f"{name} died" for name in self._census.dead()]
        return self._wrong

    async def _undisturbed(self, client: AsyncClient) -> float:
        """Seconds that a request takes beside as many others."""
        started = time.monotonic()
        for _ in range(3):
            await asyncio.gather(*(self._read(client, f"calm-{n}") for n in range(self._at_once)))
        return (time.monotonic() - started) / 3

    async def _many(self, client: AsyncClient, rounds: int) -> None:
        numbers = iter(range(rounds))

        async def one_after_the_other() -> None:
            for _ in numbers:
                await self._one(client)

        await asyncio.gather(*(one_after_the_other() for _ in range(self._at_once)))

    async def _one(self, client: AsyncClient) -> None:
        """One request and its stop."""
        name = f"soak-{self._random.getrandbits(64):x}"
        delay = self._random.uniform(0, self._latest) * self._took
        try:
            async with asyncio.timeout(HANG_S):
                if self._random.random() < 0.5:
                    self._outcomes[await self._leave(client, name, delay)] += 1
                else:
                    self._outcomes[await self._abort(client, name, delay)] += 1
        except TimeoutError:
            self._wrong.append(f"{name} hung: stopped after {delay:.3f} s, not over after {HANG_S:g} s")

    async def _leave(self, client: AsyncClient, name: str, delay: float) -> str:
        reading = asyncio.ensure_future(self._read(client, name))
        await asyncio.wait({reading}, timeout=delay)
        if reading.done():
            return f"left after the end ({reading.result()})"
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return "left"

    async def _abort(self, client: AsyncClient, name: str, delay: float) -> str:
        reading = asyncio.ensure_future(self._read(client, name))
        await asyncio.wait({reading}, timeout=delay)
        (result,) = await client.abort(name)
        if result.outcome == "unconfirmed":
            self._wrong.append(f"{name}: {', '.join(result.unconfirmed_stages)} did not confirm the abort")
        return f"abort: {result.outcome}, the client saw: {await reading}"

    async def _read(self, client: AsyncClient, name: str) -> str:
        """How the stream ended."""
        try:
            async with contextlib.aclosing(client.generate("a wish", request_id=name, timeout=HANG_S)) as frames:  # type: ignore[type-var]
                async for frame in frames:
                    if isinstance(frame, Finished):
                        return str(frame.finish_reason)
        except StageMeshError as error:
            self._wrong.append(f"{name}: {error!r}")
            return "error"
        return "no end"


def growth(samples: list[Sizes]) -> list[str]:
    """What grew from the first sample to the last; prints the table."""
    first, last, wrong = samples[0], samples[-1], []
    for name, before in first.mib.items():
        after = last.mib[name]
        print(f"| {name} | {before:.1f} MiB | {after:.1f} MiB | {after - before:+.1f} MiB |")
        if after - before > FLAT_MIB:
            wrong.append(f"{name} grew by {after - before:.1f} MiB")
        for kind, counts in (("threads", (first.threads, last.threads)), ("open files", (first.files, last.files))):
            if counts[1][name] > counts[0][name] + 4:
                wrong.append(f"{name}: {counts[0][name]} {kind} became {counts[1][name]}")
    return wrong

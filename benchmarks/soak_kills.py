"""A storm of kills on real engines: three writers on vLLM, one of them killed every few seconds while requests stream.

Each writer has a node of its own, as if on a machine of its own. A kill hits the replica's process or, every other
time, its engine's. Every stream must be complete and the same, byte for byte, as one that nobody disturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from soak_leftovers import Census

from stagemesh import StageFinished, StageMeshError, TextDelta
from stagemesh.client.admin import AdminClient
from stagemesh.client.aio import AsyncClient
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from tests.mesh.faults.processes import Processes, processes

SHAPES = Path(__file__).resolve().parents[1] / "examples/shapes"
PIPELINE = """
name: soak
stages:
- name: writer
  stage_type: llm
  model: {model}
  input_adapter: chat
  engine_args: {{max_model_len: 256, max_num_seqs: 64}}
  default_sampling_params: {{temperature: 0.0, ignore_eos: true, max_tokens: {tokens}}}
  runtime: {{num_replicas: 3, shared_devices: true}}
"""
REPLICAS = 3
LOADED_S = 300.0
PROGRESS = 25
REQUEST_S = 540.0


def add_to(soaks: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """The command."""
    parser = soaks.add_parser("kills")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=8, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=120, help="of each request")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="between two kills")
    parser.set_defaults(run=run)


async def run(folder: Path, options: argparse.Namespace) -> list[str]:
    """Run it. Returns what is wrong."""
    wishes = [row["wish"] for row in json.loads((SHAPES / "training/held_out.json").read_text())["wishes"]]
    text = PIPELINE.format(model=SHAPES / "models/writer", tokens=options.tokens)
    with processes(folder, text) as mesh:
        # A storm of kills needs more attempts than the three that are the default, and more time.
        head = mesh.start_head("--max-attempts", "50", "--recovery-timeout", str(REQUEST_S))
        cores = len(os.sched_getaffinity(0))
        here = str(Path(__file__).parent)
        mesh.environment["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        for number in range(REPLICAS):
            mesh.environment["STAGEMESH_LOCK_DIR"] = str(folder / f"locks-{number}")
            node, device = f"node-{number}", f"cpu:{number % cores}"
            mesh.start("soak_host", "--head", mesh.address, "--node-id", node, "--devices", device)
        await asyncio.to_thread(mesh.ready, REPLICAS, LOADED_S)
        print("three writers are ready", flush=True)
        async with AsyncClient(mesh.address, timeout=REQUEST_S) as client:
            storm = Storm(mesh, client, options)
            wrong = await storm.run(wishes)
        await asyncio.to_thread(mesh.ready, REPLICAS, LOADED_S)  # all three come back
        left = await Census(mesh, head.pid).settled()
        return [*wrong, *([] if left.is_clean else [f"left behind: {left}"])]


@dataclass(slots=True)
class Answer:
    """One whole stream."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    recovery: str = ""
    error: str = ""

    def differs(self, other: Answer) -> bool:
        """Whether it is not the same, byte for byte."""
        return (self.text, self.token_ids) != (other.text, other.token_ids)


class Storm:
    """Requests, and kills beside them."""

    def __init__(self, mesh: Processes, client: AsyncClient, options: argparse.Namespace) -> None:
        self._mesh, self._client, self._options = mesh, client, options
        self._kills: list[str] = []
        self._done = 0
        self._found_none = 0
        """Times at which nothing was ready to be killed."""

    async def run(self, wishes: list[str]) -> list[str]:
        """First undisturbed, then in the storm."""
        calm = dict(zip(wishes, await self._many(wishes), strict=True))
        if broken := [answer.error for answer in calm.values() if answer.error]:
            return [f"undisturbed already: {broken[0]}"]
        killing = asyncio.create_task(self._kill_for_ever())
        started = time.monotonic()
        asked = list(itertools.islice(itertools.cycle(wishes), self._options.requests))
        answers = await self._many(asked)
        seconds = time.monotonic() - started
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        recoveries = Counter(answer.recovery or "undisturbed" for answer in answers)
        print(f"{len(answers)} requests in {seconds:.0f} s, {len(self._kills)} kills: {Counter(self._kills)}")
        print(f"{self._found_none} times no replica was ready when one was to be killed")
        print(", ".join(f"{name} {count}" for name, count in sorted(recoveries.items())))
        wrong = Counter(answer.error for answer in answers if answer.error)
        lines = [f"{count} requests failed: {error}" for error, count in wrong.items()]
        for wish, answer in zip(asked, answers, strict=True):
            if not answer.error and answer.differs(calm[wish]):
                lines.append(f"{wish!r}: {answer.text!r} ({answer.recovery}) instead of {calm[wish].text!r}")
        if not recoveries["exact"]:
            lines.append("no stream met a kill: nothing was tried")
        return lines

    async def _many(self, wishes: list[str]) -> list[Answer]:
        limit = asyncio.Semaphore(self._options.at_once)

        async def one(wish: str) -> Answer:
            async with limit:
                return await self._ask(wish)

        return list(await asyncio.gather(*(one(wish) for wish in wishes)))

    async def _ask(self, wish: str) -> Answer:
        answer = Answer()
        try:
            async for frame in self._client.generate(wish):
                if isinstance(frame, TextDelta):
                    answer.text += frame.text
                    answer.token_ids += frame.token_ids
                elif isinstance(frame, StageFinished):
                    answer.recovery = frame.recovery
        except StageMeshError as error:
            answer.error = repr(error)
        self._done += 1
        if self._done % PROGRESS == 0:
            print(f"{self._done} answers, {len(self._kills)} kills", flush=True)
        return answer

    async def _kill_for_ever(self) -> None:
        whole = itertools.cycle((True, False))
        for number in itertools.count():
            await asyncio.sleep(self._options.every)
            rows = await asyncio.to_thread(lambda: list(self._ready()))
            if not rows:
                self._found_none += 1
                continue
            report = rows[number % len(rows)].report
            victim = psutil.Process(report.pid)
            if not next(whole) and (children := victim.children()):
                victim = children[-1]
            self._kills.append("replica" if victim.pid == report.pid else "engine")
            victim.send_signal(signal.SIGKILL)

    def _ready(self) -> Iterator[registry_pb.ReplicaStatus]:
        with AdminClient(self._mesh.address) as admin:
            for row in admin.list_replicas()[0]:
                if row.state == replica_pb.REPLICA_STATE_READY:
                    yield row

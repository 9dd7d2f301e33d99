"""Storms over real replica processes: kills, and clients that leave."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

from stagemesh.rpc.errors import MeshError
from stagemesh_head.orchestration.recovery import RecoveryLimits
from tests.mesh.harness import WRITER, Cluster, cluster, eventually, llm
from tests.mesh.real_replicas import RealReplica, start_real_replica

GREEDY = [llm("writer", temperature=0, max_tokens=120)]


async def one(mesh: Cluster, number: int) -> tuple[list[int], str, str]:
    """Tokens, text and recovery of one request."""
    call = mesh.generate(f"prompt {number}", sampling=GREEDY, timeout=60)
    await call.rest()
    return call.token_ids(), call.text(), call.finished.stages[0].finished.recovery


async def test_every_stream_is_byte_identical_while_replicas_are_killed(tmp_path: Path) -> None:
    stage = {**WRITER, "engine_args": {"tokens_per_second": 60}}
    # The storm does not stop: a stream may be hit more often than the three attempts that are the default.
    limits = RecoveryLimits(max_attempts=50, max_total_s=100.0)
    async with cluster(tmp_path, [stage], recovery=limits) as mesh:
        replicas: dict[int, RealReplica] = {}
        try:
            for replica_id in range(3):
                replicas[replica_id] = await start_real_replica(mesh, "writer", replica_id)
            undisturbed = [(await result)[:2] for result in [one(mesh, number) for number in range(3)]]

            def is_streaming() -> bool:
                runs = mesh.gateway.orchestrator.requests("")
                return sum(task.state == "streaming" for run in runs for task in run.tasks) >= 30

            async def storm() -> None:
                await eventually(is_streaming, timeout=60)
                for replica_id in itertools.cycle(range(3)):
                    await replicas[replica_id].kill()
                    mesh.membership.remove(mesh.key("writer", replica_id))
                    replicas[replica_id] = await start_real_replica(mesh, "writer", replica_id)

            killing = asyncio.create_task(storm())
            results = await asyncio.gather(*(one(mesh, number % 3) for number in range(60)))
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
            assert [result[:2] for result in results] == [undisturbed[number % 3] for number in range(60)]
            # Or no stream met a kill, and the test proves nothing.
            assert any(recovery == "exact" for _, _, recovery in results)
            await mesh.quiet()
        finally:
            for replica in replicas.values():
                await replica.kill()


async def test_clients_that_leave_at_random_moments_leave_nothing_behind(tmp_path: Path) -> None:
    stage = {**WRITER, "engine_args": {"tokens_per_second": 2_000}}
    async with cluster(tmp_path, [stage]) as mesh:
        replica = await start_real_replica(mesh, "writer", 0)
        source = random.Random(11)
        try:

            async def leave(number: int) -> None:
                call = mesh.generate(f"p{number}", sampling=GREEDY, timeout=60)
                try:
                    async with asyncio.timeout(source.random() * 0.06):
                        await call.rest()
                except (TimeoutError, MeshError, asyncio.CancelledError):
                    call.cancel()

            for _ in range(20):
                await asyncio.gather(*(leave(number) for number in range(25)))
            await mesh.quiet()
            (link,) = mesh.gateway.links.links()
            await eventually(lambda: link.tasks == 0)
            assert await one(mesh, 1) == await one(mesh, 1)
            assert link.session == 1
        finally:
            await replica.kill()

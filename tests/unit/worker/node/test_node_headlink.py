"""How a node stays joined: against a scripted head over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from node_harness import ScriptedHead, assignment, eventually, hello, revocation, supervisor

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh.wire import duration
from stagemesh_worker.node import headlink
from stagemesh_worker.node.headlink import HeadLink
from stagemesh_worker.node.supervisor import Supervisor

GONE = replica_pb.REPLICA_STATE_GONE


class Node:
    """A link under test, and what it told its node."""

    def __init__(self, target: str, own: Supervisor, **options: Any) -> None:
        self.supervisor = own
        self.drains: list[tuple[float, str]] = []
        self.joins: list[bool] = []
        self.link = HeadLink(
            target,
            hello,
            own,
            lambda grace_s, reason: self.drains.append((grace_s, reason)),
            on_joined=self.joins.append,
            **options,
        )
        self.task = asyncio.create_task(self.link.run())


@pytest.fixture
async def head() -> AsyncIterator[ScriptedHead]:
    scripted = ScriptedHead()
    await scripted.start()
    yield scripted
    await scripted.stop()


@contextlib.asynccontextmanager
async def node(target: str, folder: Path, **options: Any) -> AsyncIterator[Node]:
    async with supervisor(folder) as (own, _):
        one = Node(target, own, **options)
        try:
            yield one
        finally:
            one.task.cancel()
            await asyncio.gather(one.task, return_exceptions=True)


async def test_it_introduces_itself_renews_and_says_goodbye(head: ScriptedHead, tmp_path: Path) -> None:
    async with node(head.address, tmp_path) as one:
        call = await head.next_call()
        said = await call.welcome()
        assert (said.node_id, said.incarnation, said.last_head_epoch) == ("n", "one", "")
        sequences = [(await call.next("heartbeat")).sequence for _ in range(3)]
        assert sequences == [1, 2, 3]
        await one.link.leave("SIGTERM")
        assert (await call.next("goodbye")).reason == "SIGTERM"
        assert await call.next("end") is None
        async with asyncio.timeout(5):
            await one.task
        assert one.joins == [True, False]


async def test_news_are_told_at_once_and_not_at_the_next_interval(head: ScriptedHead, tmp_path: Path) -> None:
    async with node(head.address, tmp_path) as one:
        call = await head.next_call()
        await call.welcome(interval_s=60.0, lease_s=600.0)
        await call.next("heartbeat")
        one.supervisor.close_doors()
        assert (await call.next("heartbeat")).draining


async def test_it_waits_until_the_head_knows_what_there_is_to_know(head: ScriptedHead, tmp_path: Path) -> None:
    async with node(head.address, tmp_path) as one:
        call = await head.next_call()
        await call.welcome(interval_s=60.0, lease_s=600.0)
        await call.next("heartbeat")
        one.supervisor.close_doors()
        await one.link.heard_out(10)
        assert (await call.next("heartbeat")).draining, "it had come before the wait was over"


async def test_a_node_may_start_before_its_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    late = ScriptedHead()
    await late.start()
    await late.stop()
    async with node(late.address, tmp_path) as one:
        await eventually(lambda: "no session with the head at" in caplog.text)
        await late.start(late.address)
        call = await late.next_call()
        await call.welcome()
        await eventually(lambda: one.joins == [True])
        await late.stop()


async def test_after_a_restart_of_the_head_it_reports_what_runs_and_which_head_it_knew(tmp_path: Path) -> None:
    head = ScriptedHead()
    await head.start()
    async with node(head.address, tmp_path) as one:
        call = await head.next_call()
        await call.welcome(epoch="before")
        await call.send(assignment=assignment())
        running = await eventually(one.supervisor.reports)
        await head.stop()
        await head.start(head.address)
        said = await (await head.next_call()).welcome(epoch="after")
        assert said.last_head_epoch == "before"
        assert [report.replica for report in said.running] == [running[0].replica]
        assert said.incarnation == "one"
        await head.stop()


async def test_told_that_its_session_is_unknown_it_joins_again_at_once(head: ScriptedHead, tmp_path: Path) -> None:
    async with node(head.address, tmp_path):
        call = await head.next_call()
        await call.welcome()
        started = time.monotonic()
        call.end(MeshError(Reason.NODE_UNKNOWN))
        await (await head.next_call()).welcome()
        assert time.monotonic() - started < 1.0


async def test_a_head_that_falls_silent_is_left_within_the_lease_for_a_new_connection(
    head: ScriptedHead, tmp_path: Path
) -> None:
    async with node(head.address, tmp_path) as one:
        call = await head.next_call()
        call.answers_heartbeats = False
        await call.welcome(interval_s=0.2, lease_s=2.0)
        started = time.monotonic()
        again = await head.next_call()
        assert 0.8 < time.monotonic() - started < 2.0, "half the lease is left for joining again"
        await again.welcome()
        await eventually(lambda: one.joins == [True, False, True])
        async with asyncio.timeout(5):
            await call.over.wait()


async def test_a_head_that_takes_the_hello_and_says_nothing_is_left(
    head: ScriptedHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagemesh_worker.node.session.WELCOME_S", 0.3)
    async with node(head.address, tmp_path):
        call = await head.next_call()
        await call.next("hello")
        again = await head.next_call()
        await again.welcome()
        await again.next("heartbeat")


async def test_a_refusal_is_told_once_and_tried_again_slowly(
    head: ScriptedHead, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headlink, "REFUSED_BACKOFF_S", 0.05)
    async with node(head.address, tmp_path) as one:
        for _ in range(3):
            call = await head.next_call()
            await call.next("hello")
            call.end(MeshError(Reason.NODE_REFUSED, "node id 'n' is taken: host 'x', pid 7"))
        await (await head.next_call()).welcome()
        await eventually(lambda: one.joins == [True])
        told = [record.message for record in caplog.records if "is taken" in record.message]
        assert told == [f"the head at {head.address} refuses this node: node id 'n' is taken: host 'x', pid 7"]


async def test_a_version_that_does_not_fit_ends_the_node(head: ScriptedHead, tmp_path: Path) -> None:
    async with node(head.address, tmp_path) as one:
        call = await head.next_call()
        await call.next("hello")
        call.end(MeshError(Reason.VERSION_MISMATCH, "node 'n' runs StageMesh 0.1.0, this head 3.0.0"))
        with pytest.raises(MeshError, match=r"this head 3\.0\.0"):
            async with asyncio.timeout(5):
                await one.task


async def test_without_a_head_it_gives_up_when_told_to(tmp_path: Path) -> None:
    away = ScriptedHead()
    await away.start()
    await away.stop()
    async with node(away.address, tmp_path, give_up_after_s=0.5) as one:
        with pytest.raises(MeshError) as error:
            async with asyncio.timeout(10):
                await one.task
        assert error.value.reason is Reason.UNREACHABLE
        assert f"no session with the head at {away.address} for 0.5 s" in error.value.message


async def test_a_drain_order_reaches_the_node(head: ScriptedHead, tmp_path: Path) -> None:
    async with node(head.address, tmp_path) as one:
        call = await head.next_call()
        await call.welcome()
        await call.send(drain=registry_pb.DrainOrder(grace=duration(7), reason="maintenance"))
        assert await eventually(lambda: one.drains) == [(7.0, "maintenance")]


async def test_a_replica_that_went_is_reported_until_the_head_has_heard_it(head: ScriptedHead, tmp_path: Path) -> None:
    async with node(head.address, tmp_path) as one:
        call = await head.next_call()
        call.answers_heartbeats = False
        await call.welcome(interval_s=0.1, lease_s=60.0)
        await call.send(assignment=assignment())
        await eventually(one.supervisor.reports)
        await call.send(revocation=revocation())
        for _ in range(2):
            beat = await call.next("heartbeat")
            while not [report for report in beat.replicas if report.state == GONE]:
                beat = await call.next("heartbeat")
        await call.send(heartbeat_ack=registry_pb.HeartbeatAck(sequence=beat.sequence))
        await eventually(lambda: one.supervisor.reports() == [])


async def test_a_head_that_ends_every_session_at_once_is_not_flooded(head: ScriptedHead, tmp_path: Path) -> None:
    async with node(head.address, tmp_path):
        started, calls = time.monotonic(), 0
        while time.monotonic() - started < 2.0:
            call = await head.next_call()
            await call.welcome()
            call.end(MeshError(Reason.NODE_UNKNOWN))
            calls += 1
        assert calls < 40


async def test_leaving_while_there_is_no_head_takes_no_time(tmp_path: Path) -> None:
    away = ScriptedHead()
    await away.start()
    await away.stop()
    async with node(away.address, tmp_path) as one:
        await asyncio.sleep(0)
        await one.link.leave("SIGTERM")
        async with asyncio.timeout(2):
            await one.task

"""Followers of replicas and of events."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from served_registry import DEADLINE_S, RealNode, serve
from test_registry_service import ready_node

from stagemesh.config import Pipeline
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_head.registry import changes
from stagemesh_head.registry.changes import ChangeLog
from stagemesh_head.registry.effects import Happened
from stagemesh_head.registry.happenings import KEPT, EventLog
from stagemesh_head.registry.rows import ReplicaKey, ReplicaState
from stagemesh_head.registry.session import MAX_WAITING, Session


async def read(call: Any) -> Any:
    message = await asyncio.wait_for(call.read(), DEADLINE_S)
    assert message is not grpc.aio.EOF
    return message


class Follower:
    """What a gateway knows from a watch."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.rows: dict[tuple[str, int], replica_pb.ReplicaState.ValueType] = {}
        self.revision = 0

    async def step(self) -> registry_pb.WatchReplicasResponse:
        message: registry_pb.WatchReplicasResponse = await read(self.call)
        if message.snapshot:
            self.rows.clear()
        assert message.header.revision > self.revision or message.snapshot
        self.revision = message.header.revision
        for status in message.replicas:
            self.rows[status.report.replica.stage, status.report.replica.replica_id] = status.state
        for ref in message.removed:
            del self.rows[ref.stage, ref.replica_id]
        return message

    async def until(self, state: ReplicaState) -> None:
        while set(self.rows.values()) != {state.value}:
            await self.step()


async def test_a_follower_gets_a_snapshot_and_then_what_changes() -> None:
    async with serve() as served:
        node = await ready_node(served)
        follower = Follower(served.watch(registry_pb.WatchReplicasRequest(), timeout=60))
        snapshot = await follower.step()
        assert snapshot.snapshot and len(snapshot.replicas) == 3
        assert [Pipeline.model_validate_json(text) for text in snapshot.pipelines_json] == list(
            served.registry.pipelines
        )
        await node.beat(ReplicaState.SUSPECT)
        await follower.until(ReplicaState.SUSPECT)
        await node.send(goodbye=registry_pb.Goodbye())
        while follower.rows:
            await follower.step()


async def test_a_follower_goes_on_from_its_revision() -> None:
    async with serve() as served:
        node = await ready_node(served)
        follower = Follower(served.watch(registry_pb.WatchReplicasRequest(), timeout=60))
        await follower.step()
        follower.call.cancel()
        await node.beat(ReplicaState.SUSPECT)
        request = registry_pb.WatchReplicasRequest(
            after_revision=follower.revision, head_epoch=served.registry.head_epoch
        )
        follower.call = served.watch(request, timeout=60)
        assert not (await follower.step()).snapshot
        await follower.until(ReplicaState.SUSPECT)


@pytest.mark.parametrize(
    ("epoch", "revision", "reason"),
    [("another", 1, Reason.REVISION_TOO_OLD), ("", 1, Reason.INVALID_REQUEST), (None, 999, Reason.REVISION_TOO_OLD)],
)
async def test_a_follower_of_another_time_must_start_anew(epoch: str | None, revision: int, reason: Reason) -> None:
    async with serve() as served:
        request = registry_pb.WatchReplicasRequest(
            after_revision=revision, head_epoch=served.registry.head_epoch if epoch is None else epoch
        )
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await served.watch(request, timeout=DEADLINE_S).read()
        assert MeshError.from_rpc_error(ended.value).reason is reason


async def test_a_watch_of_an_unknown_pipeline_is_refused() -> None:
    async with serve() as served:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await served.watch(registry_pb.WatchReplicasRequest(pipeline="shap"), timeout=DEADLINE_S).read()
        assert MeshError.from_rpc_error(ended.value).reason is Reason.UNKNOWN_PIPELINE


async def test_load_alone_is_told_within_its_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "LOAD_PERIOD_S", 0.05)
    async with serve() as served:
        node = await ready_node(served)
        follower = Follower(served.watch(registry_pb.WatchReplicasRequest(), timeout=60))
        await follower.step()
        for report in node.fake.running.values():
            report.load.running = 5
        await node.beat(ReplicaState.READY)
        message = await follower.step()
        assert {status.report.load.running for status in message.replicas} == {5}


# -- the log of changes ---------------------------------------------------------
def key(number: int) -> ReplicaKey:
    return ReplicaKey("p", "s", number)


async def test_a_slow_follower_gets_the_outcome_of_many_changes_once() -> None:
    log = ChangeLog()
    for _ in range(1_000):
        log.note(key(0), "i", is_removed=False, only_load=False)
    log.note(key(1), "i", is_removed=False, only_load=False)
    log.note(key(1), "i", is_removed=True, only_load=False)
    delta = log.since(0)
    assert (delta.changed, delta.removed, delta.revision) == ((key(0),), ((key(1), "i"),), 1_002)
    assert log.since(1_000).changed == ()


async def test_removed_rows_are_forgotten_in_order_and_older_followers_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_TOMBSTONES", 2)
    log = ChangeLog()
    for number in range(4):
        log.note(key(number), "i", is_removed=True, only_load=False)
    assert log.floor == 2
    log.check(2)
    with pytest.raises(MeshError) as refused:
        log.check(1)
    assert refused.value.reason is Reason.REVISION_TOO_OLD
    assert [k for k, _ in log.since(2).removed] == [key(2), key(3)]


async def test_changes_in_a_burst_come_as_few_messages() -> None:
    log = ChangeLog()
    loop = asyncio.get_running_loop()
    received: list[int] = []

    async def follow() -> None:
        async for delta in log.follow(0):
            received.append(delta.revision)
            if delta.revision == 500:
                return

    task = asyncio.create_task(follow())
    started = loop.time()
    for _ in range(500):
        log.note(key(0), "i", is_removed=False, only_load=False)
        await asyncio.sleep(0)
    await asyncio.wait_for(task, DEADLINE_S)
    assert len(received) <= 2 + (loop.time() - started) / changes.COALESCE_S


# -- events -----------------------------------------------------------------------
async def test_events_of_the_past_come_first_when_asked_for() -> None:
    async with serve() as served:
        await ready_node(served)
        call = served.admin.WatchEvents(admin_pb.WatchEventsRequest(include_past=True), timeout=60)
        first = (await read(call)).event
        assert (first.number, first.type, first.node_id) == (1, "node.joined", "a")
        types = [(await read(call)).event.type for _ in range(served.registry.events.last_number - 1)]
        assert types.count("replica.assigned") == types.count("replica.ready") == 3


async def test_only_new_events_come_otherwise() -> None:
    async with serve() as served:
        await ready_node(served)
        call = served.admin.WatchEvents(admin_pb.WatchEventsRequest(), timeout=60)
        await call.initial_metadata()
        await RealNode(served, "b").join()
        assert (await read(call)).event.node_id == "b"


async def test_a_watcher_goes_on_after_a_number_and_not_after_one_of_another_epoch() -> None:
    log = EventLog(lambda: 0.0)
    for number in range(3):
        log.add(Happened("node.joined", f"n{number}"))
    events = log.watch(2, include_past=False)
    assert (await anext(events)).node_id == "n2"
    with pytest.raises(MeshError) as refused:
        await anext(log.watch(7, include_past=False))
    assert refused.value.reason is Reason.REVISION_TOO_OLD


async def test_the_log_keeps_the_last_thousand_and_numbers_show_a_gap() -> None:
    log = EventLog(lambda: 0.0)
    for number in range(KEPT + 5):
        log.add(Happened("node.joined", f"n{number}"))
    assert (await anext(log.watch(0, include_past=True))).number == 6
    assert (await anext(log.watch(2, include_past=False))).number == 6
    assert log.counts["node.joined"] == KEPT + 5


# -- sessions that are not read -----------------------------------------------------
async def test_a_node_that_reads_nothing_is_cut_off_at_a_bound() -> None:
    session = Session(1, "peer")
    for _ in range(MAX_WAITING + 1):
        session.send(registry_pb.JoinResponse())
    assert session.is_closed and session.error is not None
    assert session.error.reason is Reason.OVERLOADED
    session.send(registry_pb.JoinResponse())
    count = 0
    while await session.next() is not None:
        count += 1
    assert count == MAX_WAITING

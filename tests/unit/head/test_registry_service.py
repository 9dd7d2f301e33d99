"""RegistryService over a wire: sessions, hostile peers, followers."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from registry_harness import World
from served_registry import DEADLINE_S, RealNode, Served, serve

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh_head.registry.rows import ReplicaKey, ReplicaRow, ReplicaState

WRITER = ReplicaKey("shapes", "writer", 0)


async def end_of(call: Any) -> MeshError:
    """How a call ends."""
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        while await asyncio.wait_for(call.read(), DEADLINE_S) is not grpc.aio.EOF:
            pass
        await call
    return MeshError.from_rpc_error(ended.value)


async def state_becomes(served: Served, key: ReplicaKey, wanted: ReplicaState | None) -> None:
    """Wait until a row has a state; None: until it is no more."""
    reached = asyncio.Event()

    def look(changed: ReplicaKey, row: ReplicaRow | None) -> None:
        if changed == key and (row.state if row is not None else None) is wanted:
            reached.set()

    unsubscribe = served.registry.subscribe(look)
    rows = {row.key: row.state for row in served.registry.rows()}
    if rows.get(key) is wanted:
        reached.set()
    await asyncio.wait_for(reached.wait(), DEADLINE_S)
    unsubscribe()


async def ready_node(served: Served, node_id: str = "a") -> RealNode:
    """A node whose three replicas are READY."""
    node = await RealNode(served, node_id).join()
    for _ in range(3):
        assert (await node.read()).HasField("assignment")
    await node.beat(ReplicaState.READY)
    return node


# -- sessions -----------------------------------------------------------------
async def test_a_node_joins_over_the_wire_and_is_told_what_to_run() -> None:
    async with serve() as served:
        node = await ready_node(served)
        assert {row.state for row in served.registry.rows()} == {ReplicaState.READY}
        welcome = node.fake.got("welcome")[0]
        assert welcome.header.head_epoch == served.registry.head_epoch
        assignment = node.fake.got("assignment")[0]
        assert assignment.start_timeout.seconds == 300
        assert [list(device.cores) for device in assignment.devices] == [[0]]
        assert '"name":"writer"' in assignment.stage_config_json


async def test_a_refused_node_reads_the_sentence() -> None:
    async with serve() as served:
        call = served.join(timeout=DEADLINE_S)
        hello = World(*served.registry.pipelines).node("b").hello_message(stages=["paintr"])
        await call.write(registry_pb.JoinRequest(hello=hello))
        error = await end_of(call)
        assert error.reason is Reason.UNKNOWN_STAGE
        assert "did you mean painter?" in error.message
        assert served.registry.events.counts["node.refused"] == 1


async def test_a_node_that_tries_again_and_again_makes_one_event() -> None:
    async with serve() as served:
        for _ in range(5):
            call = served.join(timeout=DEADLINE_S)
            hello = World(*served.registry.pipelines).node("b").hello_message(software_version="9.0.0")
            await call.write(registry_pb.JoinRequest(hello=hello))
            assert (await end_of(call)).reason is Reason.VERSION_MISMATCH
        assert served.registry.events.counts["node.refused"] == 1


async def test_a_call_that_is_cut_makes_its_replicas_suspect_at_once_and_a_new_one_heals_them() -> None:
    async with serve() as served:
        node = await ready_node(served)
        node.call.cancel()
        await state_becomes(served, WRITER, ReplicaState.SUSPECT)
        await node.join()
        await state_becomes(served, WRITER, ReplicaState.READY)
        assert len(node.fake.got("assignment")) == 3


async def test_a_node_that_ends_its_stream_is_gone_at_once() -> None:
    async with serve() as served:
        node = await ready_node(served)
        await node.call.done_writing()
        await state_becomes(served, WRITER, None)
        assert await node.call.code() is grpc.StatusCode.OK


async def test_goodbye_ends_the_session_well() -> None:
    async with serve() as served:
        node = await ready_node(served)
        await node.send(goodbye=registry_pb.Goodbye(reason="moving"))
        await state_becomes(served, WRITER, None)
        assert await node.call.code() is grpc.StatusCode.OK
        nodes = await served.admin.ListNodes(admin_pb.ListNodesRequest(), timeout=DEADLINE_S)
        assert nodes.nodes[0].state == admin_pb.NODE_STATE_GONE


async def test_a_lease_that_runs_out_closes_the_session_with_join_again() -> None:
    async with serve(heartbeat_interval_s=0.05, lease_s=0.2) as served:
        node = await RealNode(served, "a").join()
        error = await end_of(node.call)
        assert error.reason is Reason.NODE_UNKNOWN and error.retryable


async def test_a_heartbeat_in_a_new_session_means_join_again() -> None:
    async with serve() as served:
        call = served.join(timeout=DEADLINE_S)
        await call.write(registry_pb.JoinRequest(heartbeat=registry_pb.Heartbeat(sequence=1, incarnation="x")))
        assert (await end_of(call)).reason is Reason.NODE_UNKNOWN


async def test_a_closing_head_sends_its_nodes_to_the_next() -> None:
    async with serve() as served:
        node = await ready_node(served)
        await served.registry.close()
        error = await end_of(node.call)
        assert error.reason is Reason.UNREACHABLE and error.retryable


# -- peers that mean no good ------------------------------------------------------
async def test_silent_connections_are_closed_and_harm_nobody() -> None:
    async with serve(hello_timeout_s=0.3) as served:
        silent = [served.join(timeout=DEADLINE_S) for _ in range(500)]
        node = await ready_node(served)
        errors = await asyncio.gather(*(end_of(call) for call in silent))
        assert {error.message for error in errors} == {"no hello within 0.3 s"}
        await node.beat(ReplicaState.READY)
        assert {row.state for row in served.registry.rows()} == {ReplicaState.READY}


async def test_sessions_beyond_the_bound_are_refused() -> None:
    async with serve(max_sessions=2) as served:
        nodes = [await RealNode(served, name).join() for name in ("a", "b")]
        call = served.join(timeout=DEADLINE_S)
        assert (await end_of(call)).reason is Reason.OVERLOADED
        await nodes[0].beat(ReplicaState.READY)


@pytest.mark.parametrize("garbage", [b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0f", b"", b"\x12\x02\x08\x01"])
async def test_garbage_ends_its_own_session_only(garbage: bytes) -> None:
    async with serve() as served:
        node = await ready_node(served)
        for after_hello in (False, True):
            raw = served.channel.stream_stream("/stagemesh.v1.RegistryService/Join")
            call = raw(timeout=DEADLINE_S)
            if after_hello:
                hello = World(*served.registry.pipelines).node("b").hello_message()
                await call.write(registry_pb.JoinRequest(hello=hello).SerializeToString())
            await call.write(garbage)
            assert (await end_of(call)).reason is not Reason.NODE_REFUSED
        await node.beat(ReplicaState.READY)
        assert {row.state for row in served.registry.rows() if row.node_id == "a"} == {ReplicaState.READY}


async def test_a_report_without_an_endpoint_ends_the_session_with_the_fields_name() -> None:
    async with serve() as served:
        node = await ready_node(served)
        for report in node.fake.running.values():
            report.endpoint = ""
        await node.send(
            heartbeat=registry_pb.Heartbeat(
                sequence=9, incarnation=node.fake.incarnation, replicas=list(node.fake.running.values())
            )
        )
        error = await end_of(node.call)
        assert error.metadata["field"] == "heartbeat.replicas[0].endpoint"

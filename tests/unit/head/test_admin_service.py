"""AdminService over a wire: lists, orders, calls."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2, json_format, struct_pb2
from served_registry import DEADLINE_S, RealNode, serve
from test_registry_service import ready_node

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_head.registry.rows import ReplicaState
from stagemesh_head.services import answers
from stagemesh_head.services.answers import Answers
from stagemesh_head.services.paging import page_of


async def refusal(call: Any) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return MeshError.from_rpc_error(refused.value)


def painter(replica_id: int) -> replica_pb.ReplicaRef:
    return replica_pb.ReplicaRef(pipeline="shapes", stage="painter", replica_id=replica_id)


# -- lists ----------------------------------------------------------------------
async def test_an_empty_mesh_says_which_stages_are_missing() -> None:
    async with serve() as served:
        answer = await served.admin.ListReplicas(admin_pb.ListReplicasRequest(), timeout=DEADLINE_S)
        assert {slot.reason for slot in answer.missing if slot.replica.stage == "painter"} == {
            "no node serves stage 'painter'"
        }
        assert len(answer.missing) == 3 and not answer.replicas


async def test_nodes_and_replicas_are_listed_with_what_people_ask_for() -> None:
    async with serve() as served:
        await ready_node(served)
        nodes = await served.admin.ListNodes(admin_pb.ListNodesRequest(), timeout=DEADLINE_S)
        node = nodes.nodes[0]
        assert (node.node_id, node.state, node.hostname) == ("a", admin_pb.NODE_STATE_LIVE, "host-a")
        assert len(node.replicas) == 3 and not node.free_device_ids
        assert node.peer.startswith("ipv4:127.0.0.1")
        replicas = await served.admin.ListReplicas(admin_pb.ListReplicasRequest(stage="painter"), timeout=DEADLINE_S)
        assert [status.report.replica.replica_id for status in replicas.replicas] == [0, 1]
        assert {status.state for status in replicas.replicas} == {replica_pb.REPLICA_STATE_READY}
        assert {status.inflight for status in replicas.replicas} == {2}
        assert {len(status.report.device_ids) for status in replicas.replicas} == {1}


async def test_replicas_that_are_gone_are_listed_on_request() -> None:
    async with serve() as served:
        node = await ready_node(served)
        await node.call.done_writing()
        await node.call.code()
        plain = await served.admin.ListReplicas(admin_pb.ListReplicasRequest(), timeout=DEADLINE_S)
        whole = await served.admin.ListReplicas(admin_pb.ListReplicasRequest(include_gone=True), timeout=DEADLINE_S)
        assert not plain.replicas
        assert {(s.state, s.reason) for s in whole.replicas} == {
            (replica_pb.REPLICA_STATE_GONE, "node a is gone: it ended its session")
        }


async def test_pages_cover_all_rows_once() -> None:
    async with serve() as served:
        for number in range(5):
            await RealNode(served, f"n{number}", 1).join()
        seen, token = [], ""
        while True:
            page = await served.admin.ListNodes(
                admin_pb.ListNodesRequest(page_size=2, page_token=token), timeout=DEADLINE_S
            )
            seen += [node.node_id for node in page.nodes]
            token = page.next_page_token
            if not token:
                break
        assert seen == [f"n{number}" for number in range(5)]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"page_size": -1}, "page_size"),
        ({"page_token": "?"}, "page_token"),
        ({"page_token": "eyJ4IjoxfQ=="}, "page_token"),
        ({"page_token": "WzEsMl0="}, "page_token"),
    ],
)
async def test_a_page_that_cannot_be_is_refused(fields: dict[str, Any], field: str) -> None:
    async with serve() as served:
        await RealNode(served, "a").join()
        error = await refusal(served.admin.ListNodes(admin_pb.ListNodesRequest(**fields), timeout=DEADLINE_S))
        assert error.reason is Reason.INVALID_REQUEST and error.metadata["field"] == field


async def test_a_list_of_an_unknown_stage_is_refused() -> None:
    async with serve() as served:
        request = admin_pb.ListReplicasRequest(stage="panter")
        error = await refusal(served.admin.ListReplicas(request, timeout=DEADLINE_S))
        assert error.reason is Reason.UNKNOWN_STAGE and "did you mean painter?" in error.message


def test_rows_that_come_and_go_between_pages_repeat_none() -> None:
    first, token = page_of([1, 3, 5, 7], lambda n: [n], 2, "")
    second, end = page_of([2, 5, 6, 7], lambda n: [n], 9, token)
    assert (first, second, end) == ([1, 3], [5, 6, 7], "")


def test_pages_are_capped() -> None:
    page, token = page_of(range(5_000), lambda n: [n], 100_000, "")
    assert len(page) == 1_000 and token


# -- orders -----------------------------------------------------------------------
async def test_an_order_that_is_sent_twice_is_done_once() -> None:
    async with serve() as served:
        node = await ready_node(served)
        request = admin_pb.DrainReplicaRequest(replica=painter(1), reason="test", request_id="r1")
        first = await served.admin.DrainReplica(request, timeout=DEADLINE_S)
        assert first.replica.state == replica_pb.REPLICA_STATE_DRAINING
        again = await served.admin.DrainReplica(request, timeout=DEADLINE_S)
        assert again == first
        revocation = await node.read()
        assert revocation.revocation.grace.seconds == 60
        await node.beat(ReplicaState.READY)
        assert len(node.fake.got("revocation")) == 1


async def test_an_id_that_was_given_to_another_order_is_refused() -> None:
    async with serve() as served:
        await ready_node(served)
        scale = served.admin.ScaleStage
        await scale(admin_pb.ScaleStageRequest(stage="painter", replicas=1, request_id="x"), timeout=DEADLINE_S)
        error = await refusal(
            scale(admin_pb.ScaleStageRequest(stage="painter", replicas=2, request_id="x"), timeout=DEADLINE_S)
        )
        assert error.metadata["field"] == "request_id"


async def test_a_failed_order_may_be_sent_again() -> None:
    async with serve() as served:
        request = admin_pb.DrainNodeRequest(node_id="a", request_id="x")
        error = await refusal(served.admin.DrainNode(request, timeout=DEADLINE_S))
        assert error.code is grpc.StatusCode.NOT_FOUND
        node = await ready_node(served)
        answer = await served.admin.DrainNode(request, timeout=DEADLINE_S)
        assert answer.node.state == admin_pb.NODE_STATE_DRAINING
        assert (await node.read()).drain.grace.seconds == 60


async def test_scaling_tells_the_target_before_and_what_is_missing() -> None:
    async with serve() as served:
        await ready_node(served)
        answer = await served.admin.ScaleStage(
            admin_pb.ScaleStageRequest(stage="painter", replicas=3), timeout=DEADLINE_S
        )
        assert (answer.previous_replicas, answer.replicas) == (2, 3)
        assert [(slot.replica.replica_id, slot.reason) for slot in answer.missing] == [
            (2, "node a has 0 free devices of 2, 1 is needed")
        ]


async def test_draining_a_replica_that_has_not_started_answers_that_it_is_gone() -> None:
    async with serve() as served:
        await RealNode(served, "a").join()
        request = admin_pb.DrainReplicaRequest(replica=painter(1), grace=duration_pb2.Duration(seconds=1))
        answer = await served.admin.DrainReplica(request, timeout=DEADLINE_S)
        assert answer.replica.state == replica_pb.REPLICA_STATE_GONE


def test_answers_are_forgotten_after_a_while_and_beyond_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "KEPT", 2)
    now = [0.0]
    kept = Answers(lambda: now[0])
    done: list[str] = []

    def work(request: admin_pb.ScaleStageRequest) -> int:
        done.append(request.request_id)
        return len(done)

    def order(name: str) -> int:
        return kept.once(admin_pb.ScaleStageRequest(request_id=name), work)

    assert (order("a"), order("a"), order("b"), order("b")) == (1, 1, 2, 2)
    assert order("c") == 3
    assert order("a") == 4
    now[0] += answers.KEPT_S + 1
    assert order("a") == 5
    assert kept.once(admin_pb.ScaleStageRequest(), work) == 6


# -- collective calls ------------------------------------------------------------------
async def test_a_collective_call_reaches_all_stages_with_plain_values() -> None:
    async with serve() as served:
        request = admin_pb.CallStagesRequest(
            method="sleep", args=json_format.ParseDict([1, "x"], struct_pb2.ListValue())
        )
        request.kwargs.update({"level": 2})
        await served.admin.CallStages(request, timeout=DEADLINE_S)
        assert served.caller.calls == [("shapes", ["writer", "painter"], "sleep", [1, "x"], {"level": 2})]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "method"),
        ({"method": "sleep", "timeout": duration_pb2.Duration(seconds=-1)}, "timeout"),
        ({"method": "sleep", "stages": ["writr"]}, "stage"),
    ],
)
async def test_a_collective_call_that_cannot_be_is_refused(fields: dict[str, Any], field: str) -> None:
    async with serve() as served:
        error = await refusal(served.admin.CallStages(admin_pb.CallStagesRequest(**fields), timeout=DEADLINE_S))
        assert field in (error.metadata.get("field"), *error.metadata)
        assert not served.caller.calls

"""Draining and scaling."""

from __future__ import annotations

import pytest
from registry_harness import FakeNode, World, pipeline, stage

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_head.registry.rows import ReplicaKey, ReplicaState
from stagemesh_head.registry.state import NodeState
from stagemesh_head.registry.views import missing_views


def slot(replica_id: int, name: str = "writer") -> ReplicaKey:
    return ReplicaKey("shapes", name, replica_id)


def two_writers() -> tuple[World, FakeNode]:
    world = World(pipeline(stage("writer", 2)))
    return world, world.node("a").join().ready()


def drain(world: World, key: ReplicaKey, incarnation: str = "", grace_s: float = 30.0) -> None:
    world.do(world.machine.drain_replica(key, incarnation, grace_s, "upgrade", world.now))


def scale(world: World, replicas: int, name: str = "writer") -> int:
    previous, effects = world.machine.scale_stage("", name, replicas, world.now)
    world.do(effects)
    return previous


# -- one replica -------------------------------------------------------------
def test_a_drained_replica_takes_nothing_new_finishes_and_is_replaced() -> None:
    world, node = two_writers()
    old = world.rows[slot(0)].incarnation
    drain(world, slot(0))
    assert world.states() == {"writer/0": "DRAINING", "writer/1": "READY"}
    order = node.got("revocation")[0]
    assert (order.replica.replica_id, order.replica.incarnation, order.grace.seconds) == (0, old, 30)
    assert order.reason == "upgrade"
    node.beat()
    assert world.states()["writer/0"] == "DRAINING"
    node.set(ReplicaState.GONE, slot(0)).beat()
    assert world.states() == {"writer/0": "ASSIGNED", "writer/1": "READY"}
    node.ready()
    assert world.rows[slot(0)].incarnation != old


def test_a_node_that_still_calls_a_drained_replica_ready_does_not_bring_it_back() -> None:
    world, node = two_writers()
    drain(world, slot(0))
    node.ready()
    assert world.states()["writer/0"] == "DRAINING"
    node.disconnect().join()
    assert world.states()["writer/0"] == "DRAINING"
    assert len(node.got("revocation")) == 2


def test_a_drained_replica_whose_node_was_out_of_sight_is_not_resurrected() -> None:
    world, node = two_writers()
    drain(world, slot(0))
    node.disconnect()
    world.tick(10.1)
    node.set(ReplicaState.READY).join()
    assert world.states().get("writer/1") == "READY"
    assert "it is over" in node.got("revocation")[-1].reason
    assert "writer/0" not in world.states() or world.rows[slot(0)].incarnation == ""


def test_an_order_for_an_earlier_process_is_refused() -> None:
    world, _ = two_writers()
    with pytest.raises(MeshError) as refused:
        drain(world, slot(0), incarnation="older")
    assert refused.value.reason is Reason.STALE_INCARNATION
    assert world.states()["writer/0"] == "READY"


@pytest.mark.parametrize(
    ("key", "reason", "sentence"),
    [
        (slot(7), Reason.UNKNOWN_REPLICA, "there is no replica shapes/writer/7; there are 0, 1"),
        (slot(0, "writr"), Reason.UNKNOWN_STAGE, "did you mean writer?"),
        (ReplicaKey("shape", "writer", 0), Reason.UNKNOWN_PIPELINE, "did you mean shapes?"),
    ],
)
def test_an_order_for_something_unknown_says_what_there_is(key: ReplicaKey, reason: Reason, sentence: str) -> None:
    world, _ = two_writers()
    with pytest.raises(MeshError) as refused:
        drain(world, key)
    assert refused.value.reason is reason and sentence in refused.value.message


def test_a_grace_out_of_bounds_is_refused() -> None:
    world, _ = two_writers()
    with pytest.raises(MeshError, match="grace"):
        drain(world, slot(0), grace_s=-1.0)


def test_draining_a_failed_replica_has_it_tried_again() -> None:
    world, node = two_writers()
    node.set(ReplicaState.FAILED, slot(0), error=MeshError(Reason.START_FAILED, "port taken").to_status()).beat()
    assert world.states()["writer/0"] == "FAILED"
    drain(world, slot(0))
    assert world.states()["writer/0"] == "ASSIGNED"


def test_a_slot_waits_until_its_node_has_stopped_the_process_before() -> None:
    world = World(pipeline(stage("writer")))
    node = world.node("a", 2).join()
    drain(world, slot(0))
    assert world.states() == {}
    slots = missing_views(world.machine.state, {}, is_holding=False)
    assert [missing.reason for missing in slots] == ["node a still stops an earlier process of it"]
    node.beat()
    assert world.states() == {}
    node.set(ReplicaState.GONE, slot(0)).beat()
    assert world.states() == {"writer/0": "ASSIGNED"}


def test_a_slot_whose_process_never_started_is_free_again_after_two_heartbeats() -> None:
    world = World(pipeline(stage("writer")))
    node = world.node("a", 2).join()
    drain(world, slot(0))
    node.running.clear()
    node.beat().beat()
    assert world.states() == {}  # both may have been under way
    world.tick(1.0)
    node.beat()
    assert world.states() == {"writer/0": "ASSIGNED"}


# -- one node -----------------------------------------------------------------
def test_a_drained_node_takes_nothing_new_and_its_slots_go_elsewhere_when_it_left() -> None:
    world = World(pipeline(stage("writer", 2)))
    a = world.node("a", 1).join().ready()
    b = world.node("b", 2).join().ready()
    world.do(world.machine.drain_node("a", 20.0, "kernel", world.now))
    assert a.got("drain")[0].grace.seconds == 20
    assert world.states() == {"writer/0": "DRAINING", "writer/1": "READY"}
    assert world.machine.state.nodes["a"].state is NodeState.DRAINING
    a.beat(draining=True)
    a.leave()
    b.beat()
    assert world.places() == {"writer/0": ("b", "cpu:1"), "writer/1": ("b", "cpu:0")}


def test_a_draining_node_that_reconnects_is_told_again() -> None:
    world, node = two_writers()
    world.do(world.machine.drain_node("a", 20.0, "kernel", world.now))
    node.disconnect().join()
    assert len(node.got("drain")) == 2
    assert set(world.states().values()) == {"DRAINING"}


def test_a_node_that_drains_by_itself_gets_nothing_more() -> None:
    world = World(pipeline(stage("writer", 2)))
    node = world.node("a", 1).join().ready()
    node.beat(draining=True)
    assert world.states() == {"writer/0": "DRAINING"}
    node.running.clear()
    node.beat(draining=True)
    assert world.states() == {}


def test_a_restarted_node_is_no_longer_draining() -> None:
    world, node = two_writers()
    world.do(world.machine.drain_node("a", 20.0, "kernel", world.now))
    node.leave().join().ready()
    assert set(world.states().values()) == {"READY"}


def test_draining_an_unknown_node_names_those_there_are() -> None:
    world, _ = two_writers()
    with pytest.raises(MeshError, match="there is no node 'x'; there are a"):
        world.machine.drain_node("x", 1.0, "", world.now)


# -- one stage -----------------------------------------------------------------
def test_scaling_up_fills_new_slots_and_down_drains_the_highest_ids() -> None:
    world = World(pipeline(stage("writer")))
    node = world.node("a", 4).join().ready()
    assert scale(world, 3) == 1
    assert world.states() == {"writer/0": "READY", "writer/1": "ASSIGNED", "writer/2": "ASSIGNED"}
    node.ready()
    assert scale(world, 1) == 3
    assert world.states() == {"writer/0": "READY", "writer/1": "DRAINING", "writer/2": "DRAINING"}
    node.set(ReplicaState.GONE, slot(1), slot(2)).beat()
    assert world.states() == {"writer/0": "READY"}


def test_scaling_to_zero_and_back() -> None:
    world = World(pipeline(stage("writer")))
    node = world.node("a", 1).join().ready()
    scale(world, 0)
    node.set(ReplicaState.GONE).beat()
    assert world.states() == {}
    scale(world, 1)
    node.ready()
    assert world.states() == {"writer/0": "READY"}


def test_an_order_to_scale_outweighs_what_nodes_bring() -> None:
    world = World(pipeline(stage("writer")))
    node = world.node("a", 4, stages=["writer"], max_replicas=3).join().ready()
    assert len(world.rows) == 3
    scale(world, 1)
    node.set(ReplicaState.GONE, slot(1), slot(2)).beat()
    assert world.states() == {"writer/0": "READY"}


@pytest.mark.parametrize("replicas", [0, 1, 4])
def test_a_restarted_head_learns_from_its_nodes_what_was_scaled(replicas: int) -> None:
    world = World(pipeline(stage("writer", 2)))
    node = world.node("a", 4).join().ready()
    scale(world, replicas)
    node.beat().ready()
    node.set(ReplicaState.GONE, *[key for key in node.running if key.replica_id >= replicas]).beat().ready()
    before = world.states()
    assert len(before) == replicas
    world.restart_head()
    node.join().beat()
    world.node("b", 4).join()
    for _ in range(20):
        world.tick(1.0)
        node.beat()
    assert world.states() == before, "nothing more is started, and nothing less kept"
    [event] = [event for event in world.events if event.type == "stage.scaled"]
    assert event.reason.endswith(f"was scaled to {replicas} before this head started, as its nodes tell")


def test_of_two_nodes_that_remember_different_orders_the_later_one_counts() -> None:
    world = World(pipeline(stage("writer", 2)))
    a, b = world.node("a", 4).join().ready(), world.node("b", 4).join()
    scale(world, 1)
    a.beat()
    b.beat()
    a.disconnect()
    scale(world, 3)
    b.beat()
    world.restart_head()
    a.join()
    assert world.machine.entry_of("", "writer").target == 1
    b.join()
    assert world.machine.entry_of("", "writer").target == 3


def test_an_order_to_the_new_head_counts_more_than_what_nodes_remember() -> None:
    world = World(pipeline(stage("writer", 2)))
    node = world.node("a", 4).join().ready()
    for replicas in (1, 4, 3):
        scale(world, replicas)
    node.beat()
    world.restart_head()
    scale(world, 1)
    node.join().beat()
    assert world.machine.entry_of("", "writer").target == 1
    world.restart_head()
    node.join()
    assert world.machine.entry_of("", "writer").target == 1, "and the node remembers it as the later one"


def test_a_changed_number_in_the_file_counts_more_than_what_nodes_remember() -> None:
    world = World(pipeline(stage("writer", 2)))
    node = world.node("a", 4).join().ready()
    scale(world, 1)
    node.beat()
    world.pipelines = (pipeline(stage("writer", 3)),)
    world.restart_head()
    node.join().beat()
    assert world.machine.entry_of("", "writer").target == 3


@pytest.mark.parametrize(("field", "value"), [("replicas", 2**31), ("order", 2**64 - 1)])
def test_a_scaling_out_of_bounds_is_refused_with_the_node(field: str, value: int) -> None:
    world = World(pipeline(stage("writer", 2)))
    scaled = {"pipeline": "shapes", "stage": "writer", "replicas": 1, "configured": 2, "order": 1, field: value}
    with pytest.raises(MeshError, match=rf"hello\.scaled\[0\]\.{field}"):
        world.node("a").join(scaled=[registry_pb.ScaledStage(**scaled)])
    assert not world.machine.state.nodes


def test_scaling_below_zero_is_refused() -> None:
    world, _ = two_writers()
    with pytest.raises(MeshError, match="replicas: -1: must be 0 to"):
        scale(world, -1)
    assert world.states() == {"writer/0": "READY", "writer/1": "READY"}


def test_a_replica_that_was_only_assigned_goes_at_once_when_the_stage_shrinks() -> None:
    world = World(pipeline(stage("writer", 2)))
    node = world.node("a").join()
    scale(world, 1)
    assert world.states() == {"writer/0": "ASSIGNED"}
    assert node.got("revocation")[0].replica.replica_id == 1
    assert node.running[slot(1)].state == replica_pb.REPLICA_STATE_DRAINING
    node.beat()  # the node had begun to start it
    assert world.states() == {"writer/0": "STARTING"}
    assert world.machine.state.nodes["a"].leftovers

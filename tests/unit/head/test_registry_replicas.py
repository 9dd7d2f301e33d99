"""What becomes of replicas: on their nodes, without a link, failed, moved to a spare node."""

from __future__ import annotations

from itertools import pairwise

from registry_harness import WRITER, World, beat_for, pipeline, stage, writer_world

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh_head.registry.rows import ReplicaState


def test_a_broken_link_suspends_a_replica_until_it_is_back() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    world.link(world.rows[WRITER], up=False, reason="connection reset")
    assert world.states() == {"writer/0": "SUSPECT"}
    assert world.rows[WRITER].reason == "link: connection reset"
    node.beat()
    assert world.states() == {"writer/0": "SUSPECT"}
    world.link(world.rows[WRITER], up=True)
    assert world.states() == {"writer/0": "READY"}


def test_a_late_link_down_does_not_harm_the_successor() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    old = world.rows[WRITER]
    node.running[WRITER].replica.incarnation = "second"
    node.beat()
    world.link(old, up=False)
    assert world.states() == {"writer/0": "READY"}


def test_a_replica_that_the_head_cannot_reach_goes_to_a_spare_node_after_three_leases() -> None:
    world = writer_world()
    a = world.node("a").join().ready()
    b = world.node("b").join()
    world.link(world.rows[WRITER], up=False, reason="no answer from 10.0.0.5:4000")
    beat_for(world, 29.0, a, b)
    assert world.states() == {"writer/0": "SUSPECT"}
    beat_for(world, 1.0, a, b)
    assert world.states() == {"writer/0": "DRAINING"}
    [event] = [event for event in world.events if event.type == "replica.unreachable"]
    assert "has not reached it for 30 s, though node a is well (no answer from 10.0.0.5:4000)" in event.reason
    assert a.got("revocation")[0].reason == event.reason
    a.set(ReplicaState.GONE).beat()
    assert world.places()["writer/0"][0] == "b"


def test_without_a_spare_node_it_is_tried_anew_in_its_place_and_ever_more_rarely() -> None:
    world = writer_world(link_timeout_s=10.0)
    node = world.node("a", 1).join().ready()
    starts = [world.now]
    while world.now < starts[0] + 7_200.0:
        row = world.rows[WRITER]
        if row.state is ReplicaState.READY:
            world.link(row, up=False, reason="refused")
        elif row.state is ReplicaState.DRAINING:
            node.set(ReplicaState.GONE).beat().ready()
            starts.append(world.now)
        world.tick(1.0)
        node.beat()
    gaps = [round(later - sooner, -1) for sooner, later in pairwise(starts)]
    assert gaps[:6] == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0] and set(gaps[6:]) == {320.0}
    row = world.rows[WRITER]
    world.link(row, up=True)
    assert world.rows[WRITER].state is ReplicaState.READY


def test_a_node_that_was_away_or_a_head_that_stood_still_does_not_count_against_a_link() -> None:
    world = writer_world(link_timeout_s=5.0)
    node = world.node("a").join().ready()
    world.link(world.rows[WRITER], up=False)
    world.tick(4.0)
    assert world.rows[WRITER].reason.startswith("node a: no heartbeat")
    node.beat()
    beat_for(world, 4.0, node)
    assert world.states() == {"writer/0": "SUSPECT"}
    world.tick(20.0, step=20.0)
    beat_for(world, 4.0, node)
    assert world.states() == {"writer/0": "SUSPECT"}
    world.link(world.rows[WRITER], up=True)
    assert world.states() == {"writer/0": "READY"}
    assert "replica.unreachable" not in world.event_types()


def test_a_link_that_opened_makes_a_node_as_good_as_any_other() -> None:
    world = World(pipeline(stage("writer"), stage("painter", 0)), link_timeout_s=5.0)
    a = world.node("a", 2).join().ready()
    world.link(world.rows[WRITER], up=False)
    beat_for(world, 5.0, a)
    a.set(ReplicaState.GONE).beat().ready()
    b = world.node("b", 2, labels={"kind": "spare"}).join()
    world.do(world.machine.scale_stage("", "painter", 1, world.now)[1])
    assert world.places()["painter/0"][0] == "b", "nodes that the head reaches come first"
    world.link(world.rows[WRITER], up=True)
    world.do(world.machine.scale_stage("", "painter", 0, world.now)[1])
    b.leave()
    world.do(world.machine.scale_stage("", "painter", 1, world.now)[1])
    b.join()
    assert world.places()["painter/0"][0] == "a"


def test_a_new_process_in_a_slot_starts_with_an_unknown_link() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    world.link(world.rows[WRITER], up=False)
    node.running[WRITER].replica.incarnation = "second"
    node.set(ReplicaState.STARTING, restarts=1).beat()
    assert world.states() == {"writer/0": "STARTING"}
    node.ready()
    assert world.states() == {"writer/0": "READY"}
    assert world.rows[WRITER].restarts == 1


def test_a_stuck_engine_is_suspect_with_the_nodes_reason() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    error = MeshError(Reason.ENGINE_STUCK, "3 tasks and no engine step for 61 s").to_status()
    node.set(ReplicaState.SUSPECT, error=error).beat()
    assert world.states() == {"writer/0": "SUSPECT"}
    assert world.rows[WRITER].reason == "3 tasks and no engine step for 61 s"


def test_load_reports_change_the_row_but_no_state() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    events = len(world.events)
    node.running[WRITER].load.running = 3
    node.beat()
    load = world.rows[WRITER].load
    assert load is not None and load.running == 3
    assert len(world.events) == events


def test_a_failed_replica_stays_visible_where_no_other_node_can_take_it() -> None:
    world = writer_world()
    node = world.node("a").join()
    node.set(ReplicaState.FAILED, error=MeshError(Reason.START_FAILED, "out of memory").to_status()).beat()
    assert world.states() == {"writer/0": "FAILED"}
    assert world.rows[WRITER].reason == "out of memory"
    beat_for(world, 30.0, node)
    assert len(node.got("assignment")) == 1


def test_a_failed_replica_that_starts_after_all_does_not_get_a_device_that_went_to_another() -> None:
    world = World(pipeline(stage("writer"), stage("painter", 0)))
    node = world.node("a", 1).join()
    node.set(ReplicaState.FAILED, error=MeshError(Reason.START_FAILED, "out of memory").to_status()).beat()
    world.do(world.machine.scale_stage("", "painter", 1, world.now)[1])
    assert world.places()["painter/0"] == ("a", "cpu:0")
    node.set(ReplicaState.STARTING, WRITER).beat()
    assert set(world.states()) == {"painter/0"}
    assert node.got("revocation")[0].reason == "device cpu:0 has replica shapes/painter/0"


def test_a_replica_that_works_after_all_may_come_back_to_its_node() -> None:
    world = writer_world()
    node = world.node("a").join()
    node.set(ReplicaState.FAILED, error=MeshError(Reason.START_FAILED, "disk full").to_status()).beat()
    node.set(ReplicaState.STARTING).beat()
    node.ready()
    assert world.states() == {"writer/0": "READY"}
    node.set(ReplicaState.GONE).beat()
    assert world.places()["writer/0"][0] == "a"


def test_a_failed_replica_moves_to_a_spare_node() -> None:
    world = writer_world()
    a = world.node("a").join()
    a.set(ReplicaState.FAILED, error=MeshError(Reason.START_FAILED, "out of memory").to_status()).beat()
    world.node("b").join()
    assert world.places()["writer/0"][0] == "b"
    assert a.got("revocation")[0].reason == "it moves to node b"


def test_the_room_that_a_moved_replica_leaves_is_used_at_once() -> None:
    world = World(pipeline(stage("writer"), stage("painter")))
    a = world.node("a", max_replicas=1).join()
    a.set(ReplicaState.FAILED, error=MeshError(Reason.START_FAILED, "out of memory").to_status()).beat()
    assert world.states() == {"writer/0": "FAILED"}
    world.node("b", stages=["writer"]).join()
    assert world.places() == {"painter/0": ("a", "cpu:0"), "writer/0": ("b", "cpu:0")}


def test_a_configuration_that_the_engine_refuses_is_not_carried_from_node_to_node() -> None:
    world = writer_world()
    a = world.node("a").join()
    world.node("b").join()
    error = MeshError(Reason.BAD_STAGE_CONFIG, "no such option: max_len").to_status()
    a.set(ReplicaState.FAILED, error=error).beat()
    assert world.places()["writer/0"][0] == "a"
    assert world.states() == {"writer/0": "FAILED"}


def test_a_lost_replica_is_replaced_on_a_spare_node_once_its_node_is_gone() -> None:
    world = writer_world()
    a = world.node("a").join().ready()
    b = world.node("b").join()
    a.disconnect()
    beat_for(world, 9.0, b)
    assert world.places()["writer/0"][0] == "a"
    beat_for(world, 2.0, b)
    assert world.places()["writer/0"][0] == "b"


def test_a_node_that_returns_after_its_slot_went_elsewhere_is_told_to_stop_it() -> None:
    world = writer_world()
    a = world.node("a", 1).join().ready()
    b = world.node("b", 1).join()
    a.disconnect()
    beat_for(world, 11.0, b)
    b.ready()
    a.join()
    assert "node b has the slot" in a.got("revocation")[0].reason
    assert world.places()["writer/0"][0] == "b"
    # Its device stays taken until the process is gone.
    assert world.machine.state.nodes["a"].leftovers
    a.running.clear()
    a.beat()
    assert not world.machine.state.nodes["a"].leftovers


def test_a_loaded_model_beats_one_that_still_loads() -> None:
    world = writer_world()
    a = world.node("a", 1).join().ready()
    b = world.node("b", 1).join()
    a.disconnect()
    beat_for(world, 11.0, b)
    assert world.states() == {"writer/0": "STARTING"}
    a.join()
    assert world.places()["writer/0"][0] == "a"
    assert world.states() == {"writer/0": "READY"}
    assert "node a has the slot loaded already" in b.got("revocation")[0].reason


# -- rows for people -----------------------------------------------------------------
def test_gone_rows_are_kept_for_ten_minutes() -> None:
    world = writer_world()
    world.node("a").join().ready().leave()
    world.tick(590.0, step=1.0)
    assert world.machine.state.gone and "a" in world.machine.state.nodes
    world.tick(20.0, step=1.0)
    assert not world.machine.state.gone and not world.machine.state.nodes


def test_every_change_of_a_replica_is_an_event_with_both_states() -> None:
    world = writer_world()
    world.node("a").join().beat().ready().leave()
    steps = [(e.type, e.from_state, e.to_state) for e in world.events if e.key is not None]
    assert steps == [
        ("replica.assigned", "", "ASSIGNED"),
        ("replica.starting", "ASSIGNED", "STARTING"),
        ("replica.ready", "STARTING", "READY"),
        ("replica.gone", "READY", "GONE"),
    ]

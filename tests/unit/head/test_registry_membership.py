"""How nodes and replicas come, go, and come back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from registry_harness import FakeNode, World, cores, pipeline, stage

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import device_pb2 as device_pb
from stagemesh_head.registry.rows import ReplicaKey, ReplicaState
from stagemesh_head.registry.state import NodeState

WRITER = ReplicaKey("shapes", "writer", 0)
PAINTER = ReplicaKey("shapes", "painter", 0)


def writer_world(replicas: int = 1, **settings: Any) -> World:
    return World(pipeline(stage("writer", replicas)), **settings)


def beat_for(world: World, seconds: float, *nodes: FakeNode) -> None:
    """Let time pass with regular heartbeats."""
    end = world.now + seconds
    while world.now < end:
        world.tick(1.0)
        for node in nodes:
            node.beat()


def test_node_joins_gets_its_replicas_and_they_become_ready() -> None:
    world = World(pipeline(stage("writer", shared_devices=True), stage("painter", 2)))
    node = world.node("a").join()
    assert node.got("welcome")[0].heartbeat_interval.seconds == 1
    assert world.places() == {
        "painter/0": ("a", "cpu:1"),
        "painter/1": ("a", "cpu:0"),
        "writer/0": ("a", "cpu:0"),
    }
    assert set(world.states().values()) == {"ASSIGNED"}
    node.beat()
    assert set(world.states().values()) == {"STARTING"}
    assert world.rows[WRITER].phase == "loading weights"
    node.ready()
    assert set(world.states().values()) == {"READY"}
    assert node.got("heartbeat_ack")[-1].sequence == 2


# -- heartbeats and leases ----------------------------------------------------
def test_late_heartbeats_make_a_node_suspect_and_new_ones_heal_it() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    world.tick(2.4)
    assert world.states() == {"writer/0": "READY"}
    world.tick(0.3)
    assert world.states() == {"writer/0": "SUSPECT"}
    assert "no heartbeat for 2." in world.rows[WRITER].reason
    node.beat()
    assert world.states() == {"writer/0": "READY"}
    assert world.rows[WRITER].reason == ""
    assert world.event_types()[-4:] == ["node.suspect", "replica.suspect", "node.live", "replica.ready"]


def test_a_lease_that_ran_out_ends_node_replicas_and_session() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    session = node.session
    world.tick(10.1)
    assert world.states() == {}
    assert world.machine.state.nodes["a"].state is NodeState.GONE
    assert session is not None
    error = world.closed[session]
    assert error is not None and error.reason is Reason.NODE_UNKNOWN


def test_late_heartbeat_does_not_revive_a_removed_node() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    session = node.session
    world.tick(10.1)
    node.session = session
    with pytest.raises(MeshError) as refused:
        node.beat()
    assert refused.value.reason is Reason.NODE_UNKNOWN
    assert world.states() == {}


def test_a_frozen_node_that_thaws_joins_again_and_keeps_its_loaded_replica() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    incarnation = world.rows[WRITER].incarnation
    world.tick(10.1)
    node.join()
    assert world.states() == {"writer/0": "READY"}
    assert world.rows[WRITER].incarnation == incarnation
    assert len(node.got("assignment")) == 1


def test_a_heartbeat_of_another_incarnation_is_stale() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    with pytest.raises(MeshError) as refused:
        node.beat(incarnation="older")
    assert refused.value.reason is Reason.STALE_INCARNATION


def test_a_repeated_heartbeat_is_refused() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    node.sequence -= 1
    with pytest.raises(MeshError, match=r"heartbeat\.sequence"):
        node.beat()


def test_a_head_that_stood_still_blames_nobody() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    world.tick(1.0)
    node.beat()
    world.now += 60.0
    world.tick(0.25)
    assert world.states() == {"writer/0": "READY"}
    assert "head.stalled" in world.event_types()
    node.beat()
    world.tick(2.0)
    assert world.states() == {"writer/0": "READY"}


def test_a_heartbeat_with_a_bad_report_changes_nothing() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    node.running[WRITER].state = 0
    with pytest.raises(MeshError, match=r"heartbeat\.replicas\[0\]\.state: 0: must be one of STARTING"):
        node.beat()
    assert world.states() == {"writer/0": "READY"}


# -- the ends of a session -----------------------------------------------------
def test_a_crash_is_suspected_at_once_and_gone_when_the_lease_ends() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    node.crash()
    assert world.states() == {"writer/0": "SUSPECT"}
    assert "session broke" in world.rows[WRITER].reason
    world.tick(10.1)
    assert world.states() == {}


def test_goodbye_is_seen_at_once() -> None:
    world = writer_world()
    world.node("a").join().ready().leave()
    assert world.states() == {}
    assert world.event_types()[-2:] == ["node.gone", "replica.gone"]


def test_the_end_of_a_stream_is_a_clean_exit() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    assert node.session is not None
    world.do(world.machine.session_ended(node.session, "it ended its session", world.now, on_purpose=True))
    assert world.states() == {}


def test_a_connection_glitch_heals_without_a_new_assignment() -> None:
    world = writer_world()
    node = world.node("a").join().ready().disconnect()
    assert world.states() == {"writer/0": "SUSPECT"}
    world.tick(1.0)
    node.join()
    assert world.states() == {"writer/0": "READY"}
    assert len(node.got("assignment")) == 1
    assert "node.rejoined" in world.event_types()


def test_an_assignment_that_was_lost_with_the_session_is_sent_again() -> None:
    world = writer_world()
    node = world.node("a").join()
    node.running.clear()  # it never arrived
    node.disconnect().join()
    assert len(node.got("assignment")) == 2
    assert world.states() == {"writer/0": "ASSIGNED"}


def test_a_replica_that_a_node_no_longer_has_is_gone_and_its_slot_filled_again() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    incarnation = world.rows[WRITER].incarnation
    node.running.clear()
    node.beat()
    assert len(node.got("assignment")) == 2
    assert (WRITER, incarnation) in world.machine.state.gone
    assert world.states() == {"writer/0": "ASSIGNED"}


def test_the_end_of_an_older_session_does_not_touch_its_successor() -> None:
    world = writer_world()
    node = world.node("a").join().ready()
    old = node.session
    node.join()
    assert old is not None
    world.do(world.machine.session_ended(old, "its session broke", world.now, on_purpose=False))
    assert world.states() == {"writer/0": "READY"}
    assert world.machine.state.nodes["a"].state is NodeState.LIVE


# -- identity -------------------------------------------------------------------
def test_a_restarted_node_gets_its_slots_and_devices_back() -> None:
    world = writer_world(4)
    a, b = world.node("a", 2).join(), world.node("b", 2).join()
    a.ready()
    b.ready()
    before = world.places()
    a.crash()
    b.crash()
    b.join()
    a.join()
    assert world.places() == before
    a.ready()
    b.ready()
    assert set(world.states().values()) == {"READY"}


def test_a_second_node_of_one_id_is_refused_and_learns_who_has_it() -> None:
    world = writer_world()
    world.node("a").join().ready()
    with pytest.raises(MeshError) as refused:
        world.node("a").join()
    assert refused.value.reason is Reason.NODE_REFUSED
    assert "host 'host-a', pid 4242, joined 0 s ago" in refused.value.message
    assert refused.value.metadata["conflict"] == "node_id"
    assert world.states() == {"writer/0": "READY"}


def test_a_successor_replaces_a_node_whose_heartbeats_are_late() -> None:
    world = writer_world()
    old = world.node("a").join().ready()
    session = old.session
    world.tick(3.0)
    world.node("a").join()
    assert session is not None
    error = world.closed[session]
    assert error is not None and error.reason is Reason.STALE_INCARNATION
    assert world.states() == {"writer/0": "ASSIGNED"}
    old.session = session
    with pytest.raises(MeshError):
        old.beat()


@pytest.mark.parametrize(
    ("changes", "reason", "sentence"),
    [
        ({"contract_version": "2"}, Reason.VERSION_MISMATCH, "speaks version '2' of the contract"),
        ({"software_version": "7.0.0"}, Reason.VERSION_MISMATCH, "runs StageMesh 7.0.0"),
        ({"software_version": "0.3.0"}, Reason.VERSION_MISMATCH, "one minor version apart"),
        ({"software_version": "new"}, Reason.INVALID_REQUEST, "hello.software_version: 'new'"),
        ({"node_id": "No Label"}, Reason.INVALID_REQUEST, "hello.node_id: 'No Label'"),
        ({"incarnation": ""}, Reason.INVALID_REQUEST, "hello.incarnation"),
        ({"stages": ["writr"]}, Reason.UNKNOWN_STAGE, "did you mean writer?"),
        ({"pipeline": "shape"}, Reason.UNKNOWN_PIPELINE, "did you mean shapes?"),
        ({"devices": []}, Reason.NODE_REFUSED, "offers no device"),
        ({"devices": [*cores(1), *cores(1)]}, Reason.INVALID_REQUEST, "hello.devices[1].id: 'cpu:0': is offered twice"),
        (
            {"devices": [device_pb.Device(id=f"cpu:{i}", kind="DEVICE_KIND_CPU", cores=[i, 7]) for i in range(2)]},
            Reason.NODE_REFUSED,
            "devices cpu:0 and cpu:1 overlap: both contain 7",
        ),
        ({"devices": [device_pb.Device(id="x:0")]}, Reason.INVALID_REQUEST, "hello.devices[0].kind"),
        ({"labels": {"k": "v" * 1_000}}, Reason.INVALID_REQUEST, "hello.labels"),
    ],
)
def test_a_node_that_cannot_join_reads_why(changes: dict[str, Any], reason: Reason, sentence: str) -> None:
    world = writer_world()
    with pytest.raises(MeshError) as refused:
        world.node("a").join(**changes)
    assert refused.value.reason is reason
    assert sentence in refused.value.message
    assert not world.machine.state.nodes and not world.machine.state.sessions


def test_one_minor_version_of_skew_is_accepted() -> None:
    world = writer_world()
    world.node("a").join(software_version="0.2.9")
    assert world.states() == {"writer/0": "ASSIGNED"}


def test_two_nodes_of_a_host_cannot_offer_the_same_core() -> None:
    world = writer_world(2)
    world.node("a", host_id="h").join()
    with pytest.raises(MeshError) as refused:
        world.node("b", host_id="h").join()
    assert "offers cpu:0, cpu:1, which node 'a' on the same host (pid 4242, alive) offers already" in str(refused.value)
    other = [device_pb.Device(id="cpu:0", kind=device_pb.DEVICE_KIND_CPU, cores=[5])]
    world.node("c", other, host_id="h").join()
    world.node("d", host_id="another").join()


def test_two_running_replicas_on_one_device_are_refused() -> None:
    world = writer_world(2)
    node = world.node("a").join().ready()
    for report in node.running.values():
        report.device_ids[:] = ["cpu:0"]
    world.restart_head()
    with pytest.raises(MeshError, match="both on device cpu:0"):
        node.join()


def test_a_stage_name_of_two_pipelines_needs_the_pipeline() -> None:
    world = World(pipeline(stage("writer")), pipeline(stage("writer"), name="poems"))
    with pytest.raises(MeshError, match="several pipelines"):
        world.node("a").join(stages=["writer"])
    world.node("b", stages=["writer"], pipeline="poems").join()
    assert set(world.rows) == {ReplicaKey("poems", "writer", 0)}


# -- replicas --------------------------------------------------------------------
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


# -- a head that is restarted -------------------------------------------------------
def test_after_a_head_restart_nodes_keep_ids_devices_and_loaded_models() -> None:
    world = writer_world(4)
    nodes = [world.node(name, 2).join().ready() for name in ("a", "b")]
    before = {key: (row.node_id, row.device_ids, row.incarnation) for key, row in world.rows.items()}
    world.restart_head()
    nodes[1].join()
    world.tick(2.0)
    nodes[0].join()
    assert {key: (row.node_id, row.device_ids, row.incarnation) for key, row in world.rows.items()} == before
    assert [len(node.got("assignment")) for node in nodes] == [2, 2]
    assert not nodes[0].got("revocation") + nodes[1].got("revocation")


def test_after_a_head_restart_an_idle_node_does_not_snatch_a_slot() -> None:
    world = writer_world()
    a = world.node("a").join().ready()
    idle = world.node("b").join()
    world.restart_head()
    idle.join()
    assert world.states() == {}
    assert world.machine.is_holding
    world.tick(1.0)
    a.join()
    assert world.places()["writer/0"][0] == "a"
    assert not idle.got("assignment")


def test_after_a_head_restart_slots_of_nodes_that_do_not_return_are_filled() -> None:
    world = writer_world()
    world.node("a").join().ready()
    idle = world.node("b").join()
    world.restart_head()
    idle.join()
    beat_for(world, 11.0, idle)
    assert world.places()["writer/0"][0] == "b"


def test_a_first_start_waits_for_nobody() -> None:
    world = writer_world()
    world.node("a").join()
    assert world.states() == {"writer/0": "ASSIGNED"}


def test_a_changed_stage_is_restarted_and_an_unchanged_one_is_not() -> None:
    world = World(pipeline(stage("writer", engine_args={"max_model_len": 256}), stage("painter")))
    node = world.node("a").join().ready()
    world.pipelines = (pipeline(stage("writer", engine_args={"max_model_len": 512}), stage("painter")),)
    world.restart_head()
    node.join()
    assert world.states() == {"painter/0": "READY", "writer/0": "DRAINING"}
    assert "this head serves" in world.rows[WRITER].reason
    assert [r.replica.stage for r in node.got("revocation")] == ["writer"]
    node.set(ReplicaState.GONE, WRITER).beat()
    beat_for(world, 11.0, node)
    node.ready()
    assert set(world.states().values()) == {"READY"}


def test_a_replica_of_a_stage_that_is_served_no_more_is_stopped_and_its_device_stays_taken_till_then() -> None:
    world = World(pipeline(stage("writer"), stage("painter")))
    node = world.node("a", 2).join().ready()
    world.pipelines = (pipeline(stage("writer", 2)),)
    world.restart_head()
    node.join()
    assert "serves no stage shapes/painter" in node.got("revocation")[0].reason
    beat_for(world, 11.0, node)
    assert set(world.states()) == {"writer/0"}
    del node.running[PAINTER]
    node.beat()
    assert set(world.states()) == {"writer/0", "writer/1"}


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

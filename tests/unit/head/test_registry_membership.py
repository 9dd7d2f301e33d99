"""How nodes come, go, and come back."""

from __future__ import annotations

from typing import Any

import pytest
from registry_harness import WRITER, World, cores, pipeline, stage, writer_world

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import device_pb2 as device_pb
from stagemesh_head.registry.rows import ReplicaKey
from stagemesh_head.registry.state import NodeState


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

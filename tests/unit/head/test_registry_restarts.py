"""What a head that is started again finds and keeps."""

from __future__ import annotations

from registry_harness import PAINTER, WRITER, World, beat_for, pipeline, stage, writer_world

from stagemesh_head.registry.rows import ReplicaState


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

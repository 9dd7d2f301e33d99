"""How nodes and replicas come, go, and come back."""

from __future__ import annotations

from registry_harness import World, pipeline, stage


def test_node_joins_gets_its_replicas_and_they_become_ready() -> None:
    world = World(pipeline(stage("writer", shared_devices=True), stage("painter", 2)))
    node = world.node("a").join()
    assert node.got("welcome")[0].heartbeat_interval.seconds == 1
    assert world.places() == {
        "painter/0": ("a", "cpu:1"),
        "painter/1": ("a", "cpu:0"),
        "writer/0": ("a", "cpu:0"),
    }
    node.beat()
    assert set(world.states().values()) == {"STARTING"}
    node.ready()
    assert set(world.states().values()) == {"READY"}

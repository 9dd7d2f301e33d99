"""A replica that the head cannot dial: not READY, and its node is told the address that was tried."""

from __future__ import annotations

from registry_harness import World, pipeline, stage

from stagemesh_head.registry.rows import ReplicaKey

WRITER = ReplicaKey("shapes", "writer", 0)


def test_node_is_told_which_address_the_head_cannot_reach_and_when_it_can_again() -> None:
    world = World(pipeline(stage("writer")))
    node = world.node("a").join().ready()
    row = world.rows[WRITER]
    world.link(row, up=False, reason="connection refused")
    assert world.states() == {"writer/0": "SUSPECT"}
    node.beat()
    (problem,) = node.got("heartbeat_ack")[-1].problems
    assert problem == f"the head cannot reach writer/0 at {row.endpoint}: connection refused"
    world.link(row, up=True)
    node.beat()
    assert world.states() == {"writer/0": "READY"}
    assert list(node.got("heartbeat_ack")[-1].problems) == []

"""Who gets which slot, on which devices, and why a slot stays empty."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from registry_harness import World, cores, gpus, pipeline, stage

LOCAL = {"stagemesh.local": "true"}


def reasons(world: World) -> dict[str, str]:
    """`stage/id` of a missing slot -> why."""
    from stagemesh_head.registry.views import missing_views

    slots = missing_views(world.machine.state, world.settings.reserved, is_holding=world.machine.is_holding)
    return {f"{slot.replica.stage}/{slot.replica.replica_id}": slot.reason for slot in slots}


# -- devices of one node -------------------------------------------------------
def test_replicas_get_disjoint_devices_in_order() -> None:
    world = World(pipeline(stage("painter", 3, kind="diffusion")))
    world.node("a", gpus(0, 1, 2, 3)).join()
    assert world.places() == {f"painter/{i}": ("a", f"cuda:{i}") for i in range(3)}


def test_tensor_parallel_replicas_get_as_many_gpus_each() -> None:
    world = World(pipeline(stage("writer", 2, engine_args={"tensor_parallel_size": 2})))
    world.node("a", gpus(0, 1, 2, 3)).join()
    assert world.places() == {"writer/0": ("a", "cuda:0", "cuda:1"), "writer/1": ("a", "cuda:2", "cuda:3")}


def test_on_a_cpu_node_a_replica_gets_one_core_set_whatever_its_parallelism() -> None:
    world = World(pipeline(stage("writer", engine_args={"tensor_parallel_size": 2})))
    world.node("a", 2).join()
    assert world.places() == {"writer/0": ("a", "cpu:0")}


@pytest.mark.parametrize(
    ("devices", "replicas", "parallel", "expected"),
    [
        ("1,2,3,4", 2, 2, [("cuda:1", "cuda:2"), ("cuda:3", "cuda:4")]),  # pool
        ("0,1", 4, 2, [(f"cuda:{2 * i}", f"cuda:{2 * i + 1}") for i in range(4)]),  # template
        ("0", 3, 1, [("cuda:0",), ("cuda:1",), ("cuda:2",)]),
        ("3", 1, 1, [("cuda:3",)]),  # as written
    ],
)
def test_explicit_device_lists(devices: str, replicas: int, parallel: int, expected: list[tuple[str, ...]]) -> None:
    world = World(pipeline(stage("writer", replicas, devices=devices, engine_args={"tensor_parallel_size": parallel})))
    world.node("a", gpus(*range(8))).join()
    assert world.places() == {f"writer/{i}": ("a", *ids) for i, ids in enumerate(expected)}


def test_explicit_devices_that_a_node_lacks_are_named() -> None:
    world = World(pipeline(stage("writer", devices="5")))
    world.node("a", gpus(0, 1)).join()
    assert reasons(world) == {"writer/0": "node a has no device 5, which runtime.devices names"}


def test_a_device_list_of_no_fitting_length_says_what_would_fit() -> None:
    world = World(pipeline(stage("writer", 2, devices="0,1,2")))
    world.node("a", gpus(0, 1, 2)).join()
    assert "list 2 devices (a pool) or 1 (a template)" in reasons(world)["writer/0"]


def test_a_shared_stage_prefers_a_free_device_and_lets_others_in() -> None:
    world = World(pipeline(stage("writer", shared_devices=True), stage("painter", 2)))
    world.node("a", 2).join()
    assert world.places() == {
        "writer/0": ("a", "cpu:0"),
        "painter/0": ("a", "cpu:1"),
        "painter/1": ("a", "cpu:0"),
    }


def test_replicas_of_a_shared_stage_do_not_share_with_each_other() -> None:
    world = World(pipeline(stage("writer", 3, shared_devices=True)))
    world.node("a", 2).join()
    assert set(world.places()) == {"writer/0", "writer/1"}
    assert reasons(world) == {"writer/2": "node a has 0 free devices of 2, 1 is needed"}


def test_exclusive_stages_never_share() -> None:
    world = World(pipeline(stage("writer"), stage("painter")))
    world.node("a", 1).join()
    assert world.places() == {"writer/0": ("a", "cpu:0")}
    assert reasons(world) == {"painter/0": "node a has 0 free devices of 1, 1 is needed"}


# -- over nodes ------------------------------------------------------------------
def test_stages_without_a_replica_come_first_then_those_furthest_below_target() -> None:
    world = World(pipeline(stage("a-stage", 3), stage("b-stage", 3), stage("c-stage")))
    for number, filled in enumerate(
        (
            {"a-stage/0"},
            {"a-stage/0", "b-stage/0"},
            {"a-stage/0", "b-stage/0", "c-stage/0"},
            {"a-stage/0", "a-stage/1", "b-stage/0", "c-stage/0"},
            {"a-stage/0", "a-stage/1", "b-stage/0", "b-stage/1", "c-stage/0"},
        )
    ):
        world.node(f"n{number}", 1).join()
        assert set(world.places()) == filled


def test_replicas_of_a_stage_spread_over_nodes() -> None:
    world = World(pipeline(stage("painter", 0)))
    world.node("a", 4).join()
    world.node("b", 2).join()
    _, effects = world.machine.scale_stage("shapes", "painter", 4, world.now)
    world.do(effects)
    assert [place[0] for place in world.places().values()] == ["a", "b", "a", "b"]


def test_a_node_started_for_a_stage_is_chosen_before_one_for_anything() -> None:
    world = World(pipeline(stage("writer", 0), stage("painter", 0)))
    world.node("any", 4).join()
    world.node("special", 1, stages=["painter"]).join()
    _, effects = world.machine.scale_stage("shapes", "painter", 2, world.now)
    world.do(effects)
    assert world.places()["painter/0"][0] == "special"
    assert world.places()["painter/1"][0] == "any"


def test_a_node_takes_no_more_replicas_than_it_said() -> None:
    world = World(pipeline(stage("writer", 2), stage("painter", 2)))
    world.node("a", 4, max_replicas=2).join()
    assert set(world.places()) == {"writer/0", "painter/0"}
    assert reasons(world)["writer/1"] == "node a runs 2 replicas, its limit"


def test_a_node_started_for_one_stage_brings_as_many_replicas_as_it_said_with_the_lowest_unused_ids() -> None:
    world = World(pipeline(stage("writer"), stage("painter", 2)))
    world.node("a", 1, stages=["painter"], max_replicas=1).join()
    world.node("b", 4, stages=["painter"], max_replicas=3).join()
    assert {name: place[0] for name, place in world.places().items()} == {
        "painter/0": "a",
        "painter/1": "b",
        "painter/2": "b",
        "painter/3": "b",
    }
    assert reasons(world) == {"writer/0": "no node serves stage 'writer'"}


def test_a_node_without_a_number_only_fills_what_is_wanted() -> None:
    world = World(pipeline(stage("painter")))
    world.node("a", 4, stages=["painter"]).join()
    assert set(world.places()) == {"painter/0"}


def test_zero_replicas_are_left_to_nodes_that_bring_them() -> None:
    world = World(pipeline(stage("painter", 0)))
    world.node("a", 4).join()
    assert world.places() == {}
    world.node("b", 4, stages=["painter"], max_replicas=2).join()
    assert set(world.places()) == {"painter/0", "painter/1"}


# -- reserved slots (the local node of `up`) -----------------------------------------
def reserved_world(replicas: int = 2, reserved: int = 1) -> World:
    return World(pipeline(stage("painter", replicas)), reserved={("shapes", "painter"): reserved})


def test_a_remote_node_never_gets_a_slot_that_the_local_node_will_fill() -> None:
    world = reserved_world()
    world.node("remote", 4).join()
    assert world.places() == {"painter/1": ("remote", "cpu:0")}
    assert reasons(world) == {
        "painter/0": "node remote is not the local node, which the slot is reserved for",
    }
    world.node("local", 1, labels=LOCAL).join()
    assert world.places()["painter/0"][0] == "local"


def test_a_lost_local_slot_stays_reserved() -> None:
    world = reserved_world(1)
    local = world.node("local", 1, labels=LOCAL).join()
    world.node("remote", 4).join()
    local.leave()
    assert world.places() == {}
    local.join()
    assert world.places()["painter/0"][0] == "local"


def test_a_remote_node_with_a_number_takes_ids_beyond_the_reserved_ones() -> None:
    world = reserved_world(1)
    world.node("remote", 4, stages=["painter"], max_replicas=1).join()
    assert set(world.places()) == {"painter/1"}


# -- invariants -----------------------------------------------------------------------
def _stages(draw: Any) -> list[Any]:
    return [
        stage(
            name,
            draw(st.integers(0, 5)),
            shared_devices=draw(st.booleans()),
            engine_args={"tensor_parallel_size": draw(st.sampled_from([1, 1, 2]))},
        )
        for name in ("writer", "painter", "voice")[: draw(st.integers(1, 3))]
    ]


@st.composite
def worlds(draw: Any) -> World:
    stages = _stages(draw)
    world = World(pipeline(*stages), reserved={("shapes", stages[0].name): draw(st.integers(0, 2))})
    for number in range(draw(st.integers(0, 5))):
        devices = draw(st.integers(1, 6))
        names = draw(st.lists(st.sampled_from([s.name for s in stages]), unique=True, max_size=2))
        world.node(
            f"n{number}",
            draw(st.sampled_from([cores(devices), gpus(*range(devices))])),
            stages=names,
            max_replicas=draw(st.integers(0, 4)),
            labels=LOCAL if draw(st.booleans()) else {},
        ).join()
    return world


@given(worlds())
def test_placement_keeps_its_promises_whatever_the_nodes(world: World) -> None:
    stages = {s.name: s for s in world.pipelines[0].stages}
    nodes = {node.node_id: node for node in world.nodes}
    on_device: dict[tuple[str, str], list[str]] = {}
    for key, row in world.rows.items():
        node, config = nodes[row.node_id], stages[key.stage]
        offered = [device.id for device in node.devices]
        assert set(row.device_ids) <= set(offered) and len(set(row.device_ids)) == len(row.device_ids)
        is_cpu = offered[0].startswith("cpu")
        assert len(row.device_ids) == (1 if is_cpu else config.engine_args["tensor_parallel_size"])
        assert not node.options["stages"] or key.stage in node.options["stages"]
        if key.replica_id < world.settings.reserved.get((key.pipeline, key.stage), 0):
            assert node.options["labels"] == LOCAL
        for device_id in row.device_ids:
            on_device.setdefault((row.node_id, device_id), []).append(key.stage)
    for names in on_device.values():
        assert len(set(names)) == len(names)
        assert sum(not stages[name].runtime.shared_devices for name in names) <= 1
    for node in world.nodes:
        count = sum(row.node_id == node.node_id for row in world.rows.values())
        assert not node.options["max_replicas"] or count <= node.options["max_replicas"]
    missing = reasons(world)
    for name, config in stages.items():
        for i in range(config.runtime.num_replicas):
            assert (f"{name}/{i}" in world.places()) != (f"{name}/{i}" in missing)
    assert "has room and gets it next" not in " ".join(missing.values())

"""The devices that `render` promises are those that the head's placement gives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.config import ConfigError, Pipeline, Stage
from stagemesh.config.preview import preview
from tests.unit.head.registry_harness import World, cores, gpus, pipeline, stage


def promised(served: Pipeline, devices: list[str]) -> dict[str, tuple[str, ...]]:
    return {slot.name: slot.device_ids for slot in preview(served, devices)}


def test_two_painters_get_a_core_each_and_the_writer_shares_one() -> None:
    served = pipeline(stage("writer", shared_devices=True), stage("painter", 2, kind="diffusion"))
    assert promised(served, ["cpu:0", "cpu:1"]) == {
        "writer/0": ("cpu:0",), "painter/0": ("cpu:1",), "painter/1": ("cpu:0",)
    }  # fmt: skip


def test_replica_without_room_gets_none() -> None:
    assert promised(pipeline(stage("a"), stage("b")), ["cpu:0"]) == {"a/0": ("cpu:0",), "b/0": ()}


def test_parallel_replicas_get_groups() -> None:
    served = pipeline(stage("a", 2, engine_args={"tensor_parallel_size": 2}), stage("b", devices="4"))
    assert promised(served, [f"cuda:{i}" for i in range(5)]) == {
        "a/0": ("cuda:0", "cuda:1"), "b/0": ("cuda:4",), "a/1": ("cuda:2", "cuda:3"),
    }  # fmt: skip


@st.composite
def stages(draw: st.DrawFn) -> tuple[Stage, ...]:
    made = []
    for index in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["llm", "diffusion"]))
        parallel = draw(st.integers(1, 2)) if kind == "llm" else 1
        devices = draw(st.none() | st.sampled_from(["auto", "0", "1", "0,1", "1,0", "2,3", "0,1,2,3", "5"]))
        made.append(stage(
            f"s{index}", draw(st.integers(0, 3)), kind=kind, stage_id=index, devices=devices,
            shared_devices=draw(st.booleans()),
            engine_args={"tensor_parallel_size": parallel} if parallel > 1 else {},
        ))  # fmt: skip
    return tuple(made)


@settings(max_examples=200, deadline=None)
@given(stages(), st.integers(1, 5), st.booleans())
def test_preview_is_what_the_registry_places_on_an_empty_node(
    made: tuple[Stage, ...], count: int, on_cpu: bool
) -> None:
    served = pipeline(*made)
    offered = cores(count) if on_cpu else gpus(*range(count))
    try:
        slots = promised(served, [device.id for device in offered])
    except ConfigError:
        return  # a device list that cannot be divided: validation refuses the file
    world = World(served)
    world.node("node", offered).join()
    placed = {name: devices for name, (_, *devices) in world.places().items()}
    assert {name: list(devices) for name, devices in slots.items() if devices} == placed
    for name, devices in slots.items():
        mine = next(one for one in made if one.name == name.split("/")[0])
        for other, theirs in slots.items():
            shared = set(devices) & set(theirs)
            if other != name and shared:
                neighbour = next(one for one in made if one.name == other.split("/")[0])
                assert neighbour.name != mine.name
                assert mine.runtime.shared_devices or neighbour.runtime.shared_devices


@pytest.mark.parametrize("devices", [[], ["cpu:0"]])
def test_stage_for_other_nodes_takes_nothing(devices: list[str]) -> None:
    assert promised(pipeline(stage("a", 0)), devices) == {}

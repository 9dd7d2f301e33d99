"""The memory ledger at placement: a replica that does not fit its device is not started, and the ledger says why."""

from __future__ import annotations

from registry_harness import World, pipeline, stage

from stagemesh.v1 import device_pb2 as device_pb
from stagemesh_head.registry.placement import missing_slots

GPU = device_pb.Device(id="cuda:0", kind=device_pb.DEVICE_KIND_CUDA, physical_id="0", memory_bytes=24 << 30)


def world_of(*shares: float) -> World:
    """LLM stages that share one GPU of 24 GiB."""
    stages = [
        stage(f"llm-{number}", shared_devices=True, engine_args={"gpu_memory_utilization": share})
        for number, share in enumerate(shares)
    ]
    world = World(pipeline(*stages))
    world.node("a", [GPU]).join()
    return world


def test_stages_that_fit_a_device_share_it() -> None:
    assert set(world_of(0.4, 0.5).places()) == {"llm-0/0", "llm-1/0"}


def test_stage_that_does_not_fit_is_refused_with_the_ledger() -> None:
    world = world_of(0.6, 0.5)
    assert set(world.places()) == {"llm-0/0"}
    ((_, reason),) = missing_slots(world.machine.state, {})
    assert "cuda:0 has 24.00 GiB, asked for are 26.90: llm-0/0 14.65, llm-1/0 12.25" in reason
    assert "lower gpu_memory_utilization" in reason

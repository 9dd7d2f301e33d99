"""Which devices the replicas of a pipeline get on one empty node: what placement does there, worked out beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagemesh.config.layout import devices_per_replica, split_devices
from stagemesh.config.model import Pipeline, Stage

CPU = "cpu:"


@dataclass(frozen=True, slots=True)
class Slot:
    """One replica, and the devices that it gets."""

    stage: Stage
    replica_id: int
    device_ids: tuple[str, ...]
    """Empty when the node has no room for it."""

    @property
    def name(self) -> str:
        """`stage/id`."""
        return f"{self.stage.name}/{self.replica_id}"


def preview(pipeline: Pipeline, devices: Sequence[str]) -> list[Slot]:
    """Place a pipeline on a node that has these devices and nothing on them.

    The stage with the greatest need comes first: one without any replica, then the one furthest below its number.
    Free devices go before shared ones.

    Args:
        devices: ids such as "cuda:0" or "cpu:1".

    Returns:
        A slot for each replica, by stage and id.
    """
    occupancy: dict[str, list[Stage]] = {device: [] for device in devices}
    placed: dict[str, dict[int, tuple[str, ...]]] = {stage.name: {} for stage in pipeline.stages}
    stuck: set[str] = set()
    while True:
        needy = [
            stage
            for stage in pipeline.stages
            if stage.name not in stuck and len(placed[stage.name]) < stage.runtime.num_replicas
        ]
        if not needy:
            break
        stage = min(needy, key=lambda one: _need(one, len(placed[one.name])))
        replica_id = len(placed[stage.name])
        chosen = _choose(stage, replica_id, occupancy)
        if not chosen:
            stuck.add(stage.name)
            continue
        placed[stage.name][replica_id] = chosen
        for device in chosen:
            occupancy[device].append(stage)
    return [
        Slot(stage, replica_id, placed[stage.name].get(replica_id, ()))
        for stage in pipeline.stages
        for replica_id in range(stage.runtime.num_replicas)
    ]


def _need(stage: Stage, placed: int) -> tuple[int, int]:
    """The smallest is the greatest need; `min` takes the first stage of several."""
    return (1, placed - stage.runtime.num_replicas) if placed else (0, 0)


def _choose(stage: Stage, replica_id: int, occupancy: Mapping[str, Sequence[Stage]]) -> tuple[str, ...]:
    def is_usable(device: str) -> bool:
        return all(
            other.name != stage.name and (stage.runtime.shared_devices or other.runtime.shared_devices)
            for other in occupancy[device]
        )

    needed = devices_per_replica(stage)
    groups = split_devices(stage.runtime.devices, max(stage.runtime.num_replicas, 1), needed)
    if groups is not None:
        by_number = {device.rpartition(":")[2]: device for device in occupancy}
        own = replica_id % len(groups)
        for group in (groups[own], *groups[:own], *groups[own + 1 :]):
            ids = [by_number.get(str(number)) for number in group]
            if all(device is not None and is_usable(device) for device in ids):
                return tuple(device for device in ids if device is not None)
        return ()
    if all(device.startswith(CPU) for device in occupancy):
        needed = 1  # a core set is as wide as a replica needs
    usable = sorted(filter(is_usable, occupancy), key=lambda device: len(occupancy[device]))
    if len(usable) < needed:
        return ()
    chosen = set(usable[:needed])
    return tuple(device for device in occupancy if device in chosen)

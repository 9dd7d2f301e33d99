"""Which devices of one node a replica gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stagemesh.config import ConfigError, Stage
from stagemesh.config.layout import devices_per_replica, split_devices
from stagemesh.config.ledger import check_ledger, claim_of
from stagemesh.v1 import device_pb2 as device_pb
from stagemesh_head.registry.state import StageEntry, StageKey

Occupancy = Mapping[str, Sequence[StageKey]]
"""Device id -> stages of the replicas on it."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A node cannot take a replica, and why, in words that follow its name."""

    why: str


def may_share(one: StageEntry, other: StageEntry) -> bool:
    """Whether a replica of each may lie on the same device."""
    if one.key == other.key:
        return False
    return one.config.runtime.shared_devices or other.config.runtime.shared_devices


def choose_devices(
    entry: StageEntry,
    replica_id: int,
    devices: Sequence[device_pb.Device],
    occupancy: Occupancy,
    stages: Mapping[StageKey, StageEntry],
    *,
    copies: int,
    remembered: Sequence[str] = (),
) -> tuple[str, ...] | NoRoom:
    """Device ids for one replica, or why there is none: no free device, or no room in the memory of the ones chosen.

    Args:
        copies: replicas that the stage's explicit device list is divided among.
        remembered: what the replica had before; taken again when it still fits.
    """

    def is_usable(device_id: str) -> bool:
        # A leftover of a stage that is served no more shares with nobody.
        return all(other in stages and may_share(entry, stages[other]) for other in occupancy.get(device_id, ()))

    try:
        explicit = explicit_groups(entry.config, copies)
    except ConfigError as error:
        return NoRoom(f"cannot divide runtime.devices: {error}")
    if explicit is not None:
        chosen = _from_groups(explicit, replica_id, devices, is_usable, remembered)
    else:
        chosen = _emptiest(entry.config, devices, occupancy, is_usable, remembered)
    if isinstance(chosen, NoRoom):
        return chosen
    for device in devices:
        # Core sets share the machine's memory, and no engine claims a part of that in advance.
        if device.id not in chosen or device.kind == device_pb.DEVICE_KIND_CPU or not device.memory_bytes:
            continue
        others = [claim_of(stages[key].config, 0) for key in occupancy.get(device.id, ()) if key in stages]
        try:
            check_ledger(device.id, device.memory_bytes, [*others, claim_of(entry.config, replica_id)])
        except ConfigError as error:
            return NoRoom(f"has no memory for it: {error}")
    return chosen


def _emptiest(
    stage: Stage,
    devices: Sequence[device_pb.Device],
    occupancy: Occupancy,
    is_usable: Callable[[str], bool],
    remembered: Sequence[str],
) -> tuple[str, ...] | NoRoom:
    """As many as the stage needs: those it had, else those with the fewest replicas on them."""
    ids = [device.id for device in devices]
    needed = devices_needed(stage, devices)
    if len(remembered) == needed and all(i in ids and is_usable(i) for i in remembered):
        return tuple(remembered)
    usable = [device_id for device_id in ids if is_usable(device_id)]
    if len(usable) < needed:
        have = f"{len(usable)} free device{'' if len(usable) == 1 else 's'}"
        return NoRoom(f"has {have} of {len(ids)}, {needed} {'is' if needed == 1 else 'are'} needed")
    # Empty devices first; sorted() is stable, so that ids keep the node's order.
    usable.sort(key=lambda device_id: len(occupancy.get(device_id, ())))
    chosen = set(usable[:needed])
    return tuple(device_id for device_id in ids if device_id in chosen)


def devices_needed(stage: Stage, devices: Iterable[device_pb.Device]) -> int:
    """How many devices `auto` gives: what the stage's parallelism asks for, or one core set on a CPU node."""
    if all(device.kind == device_pb.DEVICE_KIND_CPU for device in devices):
        return 1
    return devices_per_replica(stage)


def explicit_groups(stage: Stage, copies: int) -> list[list[int]] | None:
    """The device groups that the pipeline file spells out, as logical numbers on a node; None for `auto`.

    Raises:
        ConfigError: the list cannot be divided among so many copies.
    """
    return split_devices(stage.runtime.devices, max(copies, 1), devices_per_replica(stage))


def _from_groups(
    groups: Sequence[Sequence[int]],
    replica_id: int,
    devices: Sequence[device_pb.Device],
    is_usable: Callable[[str], bool],
    remembered: Sequence[str],
) -> tuple[str, ...] | NoRoom:
    by_number = {_number(device): device.id for device in devices}
    # A replica's own group first, so that ids and devices go together on a node that runs them all.
    order = sorted(range(len(groups)), key=lambda index: (index != replica_id % len(groups), index))
    absent = set()
    for index in order:
        absent |= {number for number in groups[index] if number not in by_number}
    candidates = [
        tuple(by_number[number] for number in groups[index])
        for index in order
        if all(number in by_number for number in groups[index])
    ]
    if tuple(remembered) in candidates:
        candidates.insert(0, tuple(remembered))
    for candidate in candidates:
        if all(is_usable(device_id) for device_id in candidate):
            return candidate
    if not candidates:
        numbers = ", ".join(str(number) for number in sorted(absent))
        return NoRoom(f"has no device {numbers}, which runtime.devices names")
    return NoRoom("has all device groups of runtime.devices in use")


def _number(device: device_pb.Device) -> int:
    """The logical number in a device id such as "cuda:3"; -1 where there is none."""
    tail = device.id.rpartition(":")[2]
    return int(tail) if tail.isdecimal() else -1

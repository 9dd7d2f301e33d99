"""What a node has to offer: its accelerators, or else its CPU cores in sets."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from stagemesh.v1 import device_pb2 as device_pb
from stagemesh_worker.node.cores import InventoryError, core_sets, cpu_quota
from stagemesh_worker.node.nvidia import cuda_devices

log = logging.getLogger(__name__)


def discover(*, cores_per_device: int | None = None, only: Sequence[str] = ()) -> list[device_pb.Device]:
    """The devices of this machine that this process may use: GPUs where there are any, else CPU core sets.

    Args:
        cores_per_device: cores in each CPU core set; naming it offers core sets beside GPUs, too.
        only: ids to offer, in that order; empty offers all.

    Raises:
        InventoryError: an id that is not there or named twice, or more cores a set than there are.
    """
    devices = cuda_devices()
    if not devices or cores_per_device is not None or any(name.startswith("cpu:") for name in only):
        cores = sorted(os.sched_getaffinity(0))
        devices += core_sets(cores, cores_per_device)
        quota = cpu_quota()
        if quota is not None and quota < len(cores):
            log.warning("a cgroup allows the time of %.1f cores, of the %d that are here", quota, len(cores))
    return devices if not only else pick(devices, only)


def pick(devices: Sequence[device_pb.Device], only: Sequence[str]) -> list[device_pb.Device]:
    """The devices of these ids, in their order. Raises InventoryError."""
    known = {device.id: device for device in devices}
    for name in only:
        if name not in known:
            raise InventoryError(f"--devices: {name!r} is not on this node; it has {', '.join(known)}")
    if len(set(only)) != len(only):
        raise InventoryError(f"--devices: {','.join(only)}: a device is named twice")
    return [known[name] for name in only]


__all__ = ["InventoryError", "discover", "pick"]

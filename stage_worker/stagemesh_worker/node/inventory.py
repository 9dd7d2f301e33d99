"""What a node has to offer: its accelerators, or else its CPU cores in sets."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from stagemesh.v1 import device_pb2 as device_pb

SETS_ON_A_LARGE_MACHINE = 8
"""A machine with more cores than this is split into so many sets, unless told otherwise."""


class InventoryError(ValueError):
    """The devices asked for are not there; the text says what there is."""


def discover(*, cores_per_device: int | None = None, only: Sequence[str] = ()) -> list[device_pb.Device]:
    """The devices of this machine that this process may use.

    Args:
        cores_per_device: cores in each CPU core set; by default one each up to 8 cores, else 8 even sets.
        only: ids to offer, in that order; empty offers all.

    Raises:
        InventoryError: an id that is not there, or more cores a set than there are.
    """
    devices = cuda_devices()
    if not devices or cores_per_device is not None or any(name.startswith("cpu:") for name in only):
        devices = devices + core_sets(sorted(os.sched_getaffinity(0)), cores_per_device)
        if not only and cores_per_device is None:
            devices = [device for device in devices if device.kind != device_pb.DEVICE_KIND_CPU] or devices
    if not only:
        return devices
    known = {device.id: device for device in devices}
    for name in only:
        if name not in known:
            raise InventoryError(f"--devices: {name!r} is not on this node; it has {', '.join(known)}")
    return [known[name] for name in only]


def core_sets(cores: Sequence[int], per_set: int | None = None) -> list[device_pb.Device]:
    """Split `cores` into sets `cpu:0`, `cpu:1`, ...; the last cores are left over when they do not fill a set."""
    if per_set is None:
        per_set = max(1, len(cores) // SETS_ON_A_LARGE_MACHINE) if len(cores) > SETS_ON_A_LARGE_MACHINE else 1
    if not 1 <= per_set <= len(cores):
        raise InventoryError(f"--cores-per-device: {per_set}: this node has {len(cores)} cores")
    memory = _memory_bytes()
    return [
        device_pb.Device(
            id=f"cpu:{number}",
            kind=device_pb.DEVICE_KIND_CPU,
            name=_cpu_name(),
            memory_bytes=memory,
            cores=cores[number * per_set : (number + 1) * per_set],
        )
        for number in range(len(cores) // per_set)
    ]


def cuda_devices() -> list[device_pb.Device]:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves, numbered as CUDA numbers them; none without a driver."""
    with contextlib.suppress(ImportError):
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return []
        try:
            return [
                _cuda_device(pynvml, number, physical) for number, physical in enumerate(_visible(pynvml))
            ]
        finally:
            pynvml.nvmlShutdown()
    return []


def _visible(nvml: object) -> list[str]:
    """Physical ids (indices or UUIDs) that this process may use, in CUDA's order."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return [str(index) for index in range(nvml.nvmlDeviceGetCount())]  # type: ignore[attr-defined]
    visible = []
    for part in (part.strip() for part in variable.split(",")):
        if not part or part == "-1":
            break  # CUDA stops at the first entry that is not a device
        visible.append(part)
    return visible


def _cuda_device(nvml: object, number: int, physical: str) -> device_pb.Device:
    by_index = physical.isdigit()
    handle = (
        nvml.nvmlDeviceGetHandleByIndex(int(physical))  # type: ignore[attr-defined]
        if by_index
        else nvml.nvmlDeviceGetHandleByUUID(physical.encode())  # type: ignore[attr-defined]
    )
    name = nvml.nvmlDeviceGetName(handle)  # type: ignore[attr-defined]
    return device_pb.Device(
        id=f"cuda:{number}",
        kind=device_pb.DEVICE_KIND_CUDA,
        name=name if isinstance(name, str) else name.decode(),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,  # type: ignore[attr-defined]
        physical_id=physical,
    )


def host_id() -> str:
    """Identity of this host and its shared memory: equal for processes that can map each other's segments.

    Made of the boot and the device of /dev/shm, which containers with a /dev/shm of their own do not share.
    """
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        status = os.stat("/dev/shm")
        parts.append(f"{status.st_dev}:{status.st_ino}")
    return hashlib.sha256("|".join(parts or [os.uname().nodename]).encode()).hexdigest()[:16]


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine

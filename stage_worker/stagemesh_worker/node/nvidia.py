"""NVIDIA GPUs, as NVML knows them and CUDA_VISIBLE_DEVICES leaves them."""

from __future__ import annotations

import logging
import os
from typing import Any

from stagemesh.v1 import device_pb2 as device_pb

log = logging.getLogger(__name__)

VARIABLE = "CUDA_VISIBLE_DEVICES"


def cuda_devices() -> list[device_pb.Device]:
    """The GPUs that this process may use, as `cuda:0`, `cuda:1`, ... in CUDA's order; none without a driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return visible_devices(pynvml, os.environ.get(VARIABLE))
    finally:
        pynvml.nvmlShutdown()


def visible_devices(nvml: Any, variable: str | None) -> list[device_pb.Device]:
    """The GPUs that the value of CUDA_VISIBLE_DEVICES leaves (None: not set, hence all).

    Args:
        nvml: the module pynvml, initialised.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if variable is None:
        return [_device(nvml, number, str(number), handle) for number, handle in enumerate(handles)]
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    devices: list[device_pb.Device] = []
    for entry in (part.strip() for part in variable.split(",")):
        found = _find(nvml, entry, handles, uuids)
        if found is None:
            # So does CUDA: what comes after an entry that is no device is not seen.
            if entry not in ("", "-1", "none", "NoDevFiles"):
                log.warning("%s: %r is no GPU of this machine: it and what follows is left out", VARIABLE, entry)
            break
        devices.append(_device(nvml, len(devices), *found))
    return devices


def _find(nvml: Any, entry: str, handles: list[Any], uuids: list[str]) -> tuple[str, Any] | None:
    """Physical id and handle of one entry: an index, a UUID or its beginning, or a MIG instance's UUID."""
    if entry.isdecimal():
        return (str(int(entry)), handles[int(entry)]) if int(entry) < len(handles) else None
    if entry.startswith("MIG-"):
        try:
            return entry, nvml.nvmlDeviceGetHandleByUUID(entry.encode())
        except nvml.NVMLError:
            return None
    matching = [index for index, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
    # By index, in the order of the PCI bus: libraries that read the variable themselves take no UUID.
    return (str(matching[0]), handles[matching[0]]) if len(matching) == 1 else None


def _device(nvml: Any, number: int, physical_id: str, handle: Any) -> device_pb.Device:
    try:
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:  # machines whose GPU uses the system's memory
        memory = 0
    return device_pb.Device(
        id=f"cuda:{number}",
        kind=device_pb.DEVICE_KIND_CUDA,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=memory,
        physical_id=physical_id,
    )


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()

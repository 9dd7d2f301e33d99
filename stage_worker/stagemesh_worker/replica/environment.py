"""What a replica process sets for itself before it imports an engine: cores, threads, devices, its title."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from stagemesh_worker.engines.base import DeviceSet

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_VISIBLE_DEVICES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "rocm": "HIP_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ONEAPI_DEVICE_SELECTOR",
}


def apply_devices(devices: DeviceSet) -> None:
    """Bind the process to its devices. Children and threads made later inherit this.

    Raises:
        OSError: a core of the set is not there.
    """
    if devices.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, devices.cores)
        for variable in _THREAD_VARIABLES:
            os.environ[variable] = str(len(devices.cores))
    if devices.kind == "cpu":
        # Without this a library that finds a GPU would use it, although the replica was given none.
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    elif devices.physical_ids:
        variable = _VISIBLE_DEVICES.get(devices.kind, "CUDA_VISIBLE_DEVICES")
        selector = ",".join(devices.physical_ids)
        os.environ[variable] = f"level_zero:{selector}" if devices.kind == "xpu" else selector


def apply_settings(environment: Mapping[str, str], model: str | None) -> None:
    """Set the stage's own variables, and keep a local model from looking for a hub."""
    if model and Path(model).exists():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.update(environment)


def set_title(title: str) -> None:
    """Show `title` in process lists, where setproctitle is installed."""
    try:
        from setproctitle import setproctitle
    except ImportError:
        return
    setproctitle(title)

"""Starts EngineCore before this process has a thread, an event loop or a gRPC object, so that it can be forked.

Forked, it does not import vLLM again: ready after 14.5 s instead of 21.9 s (spawned) for a small model on one core.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import tempfile
from typing import Any

from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from stagemesh.launch.parentage import die_with_parent
from stagemesh_worker.engines.base import DeviceSet
from stagemesh_worker.rundir import run_directory

MAX_IMAGE_PIXELS = 64 << 20
"""Largest picture of a prompt that is decoded (64 Mi pixels, 192 MiB)."""

_launching = False
_registered = False
_scratch: str | None = None


def set_environment(devices: DeviceSet) -> None:
    """What vLLM reads from the environment; before its import where it can be."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # An allowed domain must not send the replica on to another one, such as an address inside the cluster.
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    os.environ.setdefault("VLLM_MAX_IMAGE_PIXELS", str(MAX_IMAGE_PIXELS))
    # Sockets between the replica and its EngineCore lie where they are swept when both are killed.
    os.environ.setdefault("VLLM_RPC_BASE_PATH", str(run_directory()))
    if devices.kind == "cpu":
        # Without it "uni" is changed to "mp"; AsyncLLM starts EngineCore as a process of its own all the same.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def launch(arguments: Any, stat_logger: Any, devices: DeviceSet) -> AsyncLLM:
    """Start the engine and wait until it is ready; seconds to minutes.

    Raises:
        Exception: whatever vLLM says.
    """
    global _launching, _scratch
    _scratch = str(run_directory())
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if devices.kind == "cpu" and config.parallel_config.distributed_executor_backend == "uni":
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # only now: making the configuration sets "spawn"
    _register()
    _launching = True
    try:
        return AsyncLLM.from_vllm_config(
            config, usage_context=UsageContext.ENGINE_CONTEXT, stat_loggers=[stat_logger], disable_log_stats=True
        )
    finally:
        _launching = False


def why_refused(error: Exception) -> str:
    """vLLM's words on a configuration that it refuses, and torchvision, where that may be what is behind them."""
    text = str(error)
    if "torchvision" not in text and "failed to be inspected" not in text:
        return text
    # Which module a model could not import, vLLM says on its error output only.
    try:
        import torchvision  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
    except Exception as problem:  # a build for another torch fails in many ways
        torch = importlib.metadata.version("torch")
        return (
            f"{text}; most models that read pictures need torchvision, which cannot be imported here ({problem}): "
            f"install the build that fits torch {torch}"
        )
    return text


def _register() -> None:
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    """A killed replica must not leave its EngineCore behind."""
    if _launching:
        die_with_parent(signal.SIGKILL)
        # vLLM makes a file at every start and removes it never: this folder goes with the replica.
        tempfile.tempdir = _scratch

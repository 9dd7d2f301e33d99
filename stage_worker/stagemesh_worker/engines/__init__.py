"""Engines behind one small interface: `vllm`, `diffusion`, `synthetic`, and those of plug-ins."""

from stagemesh_worker.engines.base import (
    DeviceSet,
    Engine,
    EngineConfigError,
    EngineInput,
    EngineLoad,
    EngineTask,
    TaskSink,
)
from stagemesh_worker.engines.registry import engine_class, engine_names

__all__ = [
    "DeviceSet",
    "Engine",
    "EngineConfigError",
    "EngineInput",
    "EngineLoad",
    "EngineTask",
    "TaskSink",
    "engine_class",
    "engine_names",
]

"""How a stage reads the outputs of the stages before it."""

from stagemesh_worker.adapters.registry import AdapterRunner, TaskAdapter, find_adapter
from stagemesh_worker.adapters.types import Adapter, StageInput
from stagemesh_worker.engines.base import EngineInput

__all__ = ["Adapter", "AdapterRunner", "EngineInput", "StageInput", "TaskAdapter", "find_adapter"]

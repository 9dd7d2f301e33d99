"""A stage's `engine_args` -> vLLM's AsyncEngineArgs, with defaults that make small CPU replicas start fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from stagemesh.config import Stage, suggest
from stagemesh_worker.engines.base import DeviceSet, EngineConfigError
from stagemesh_worker.engines.vllm.hand_off import check_connector, transfer_config
from stagemesh_worker.engines.vllm.sampling import check_defaults

KV_CACHE_BYTES_ON_CPU = 64 << 20
"""Unless the stage says otherwise: enough for small models, and the core's memory falls from 1.6 GB to 0.55 GB."""

_OURS = frozenset({"disable_log_stats", "enable_log_requests", "model", "served_model_name"})
_CONFIG_CLASSES = {"kv_transfer_config": KVTransferConfig, "ec_transfer_config": ECTransferConfig}


def check_arguments(stage: Stage) -> None:
    """Check names of `engine_args` and `default_sampling_params`. Raises EngineConfigError with a did-you-mean."""
    if not stage.model:
        raise EngineConfigError("model: is missing; want a folder or a name that vLLM can load")
    if Path(stage.model).is_absolute() and not Path(stage.model).exists():
        raise EngineConfigError(f"stage {stage.name}: model: {stage.model}: there is no such folder on this node")
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for name in stage.engine_args:
        if name in _OURS:
            raise EngineConfigError(f"engine_args.{name}: is set by the mesh itself")
        if name not in known:
            hint = suggest(name, known) or "see `vllm serve --help`"
            raise EngineConfigError(f"engine_args.{name}: unknown; {hint}")
    check_connector(stage)
    check_defaults(stage)


def engine_arguments(stage: Stage, devices: DeviceSet) -> AsyncEngineArgs:
    """The engine's arguments; what the stage says goes before our defaults.

    Raises:
        EngineConfigError: vLLM refuses a value.
    """
    arguments: dict[str, Any] = {"generation_config": "vllm"}
    if devices.kind == "cpu":
        arguments |= {
            "dtype": "float32",  # CPUs without bf16 instructions are slower with it, and not exact across machines
            "enforce_eager": True,  # compiling takes 30 s and gives small models nothing
            "distributed_executor_backend": "uni",  # the worker inside EngineCore: one process less to start
            "kv_cache_memory_bytes": KV_CACHE_BYTES_ON_CPU,
        }
    if stage.runtime.max_batch_size is not None:
        arguments["max_num_seqs"] = stage.runtime.max_batch_size
    if stage.lora_modules:
        arguments |= {"enable_lora": True, "max_loras": _lora_slots(stage, devices)}
    arguments |= stage.engine_args | transfer_config(stage, devices)
    for name, kind in _CONFIG_CLASSES.items():
        if isinstance(arguments.get(name), Mapping):
            arguments[name] = _made(stage, name, kind, arguments[name])
    return _made(stage, "", AsyncEngineArgs, arguments | {"model": stage.model, "disable_log_stats": True})


def _lora_slots(stage: Stage, devices: DeviceSet) -> int:
    """Adapters that one batch may hold."""
    if devices.kind != "cpu":
        return min(4, len(stage.lora_modules))
    # vLLM's CPU kernels give a request without an adapter the weights of the last slot when another request of its
    # batch has one (vllm pull requests 48421 and 49656). With a slot more than adapters the last one stays empty.
    wanted = len(stage.lora_modules) + 1
    if stage.engine_args.get("max_loras", wanted) < wanted:
        raise EngineConfigError(
            f"stage {stage.name}: engine_args.max_loras: {stage.engine_args['max_loras']}: on a CPU want {wanted}, one "
            f"more than the {len(stage.lora_modules)} lora_modules"
        )
    return wanted


def _made(stage: Stage, name: str, kind: Any, arguments: Mapping[str, Any]) -> Any:
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        where = f"engine_args.{name}" if name else "engine_args"
        raise EngineConfigError(f"{where}: {error}") from error

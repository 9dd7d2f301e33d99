"""Overrides from the command line: per stage, and engine arguments for all stages.

Precedence: per-stage override > command-line engine argument > deploy overlay > pipeline file > default. A file that
gives a stage its own value is more specific than an argument meant for all stages, so such arguments are left out for
that stage, with one warning, but for those in `ALWAYS_KEPT`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stagemesh.config.errors import ConfigError, suggest
from stagemesh.config.merge import find_stage, from_flag, patch_stage
from stagemesh.config.model import Stage
from stagemesh.config.origins import Origin, Tree

STAGE_OVERRIDES, ENGINE_ARG = "--stage-overrides", "--engine-arg"
ALWAYS_KEPT = frozenset(
    {"worker_extension_cls", "allowed_local_media_path", "allowed_media_domains", "tensor_parallel_size"}
)
"""Engine arguments of the command line that win over a stage's own."""

VLLM_DEFAULTS: Mapping[str, Any] = {
    "gpu_memory_utilization": 0.9,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "load_format": "auto",
    "enforce_eager": False,
    "trust_remote_code": False,
    "enable_sleep_mode": False,
    "quantization": None,
    "max_model_len": None,
    "max_num_seqs": None,
    "max_num_batched_tokens": None,
    "enable_prefix_caching": None,
    "distributed_executor_backend": None,
    "seed": 0,
}
"""Defaults of vLLM's own flags. An argument that says nothing else is not applied over a file's values."""

FILL_ALL = ("enable_sleep_mode",)
FILL_DIFFUSION = (
    "lora_path", "lora_scale", "attention_backend", "attention_config", "quantization", "quantization_config",
    "kv_cache_dtype", "kv_cache_skip_steps", "kv_cache_skip_layers", "additional_config", "enable_profiler",
    "profiler_config",
)  # fmt: skip
"""Arguments that fill what a stage leaves unset: in all stages, and in diffusion stages only."""
ALIASES = {"static_lora_scale": "lora_scale"}


def parse_stage_overrides(text: str) -> dict[str, dict[str, Any]]:
    """The value of --stage-overrides. Raises ConfigError that says where the JSON breaks."""
    parsed = _parse_json(text, STAGE_OVERRIDES)
    if not isinstance(parsed, dict) or not all(isinstance(value, dict) for value in parsed.values()):
        raise ConfigError(
            'want an object of objects, by stage id or name: {"painter": {"runtime": {"num_replicas": 2}}}',
            file=STAGE_OVERRIDES,
            value=parsed,
        )
    return parsed


def parse_engine_args(pairs: list[str]) -> dict[str, Any]:
    """`KEY=VALUE` words; values are JSON where they can be, else text. Raises ConfigError."""
    parsed: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        name = key.strip().removeprefix("--").replace("-", "_")
        if not separator or not name:
            raise ConfigError("want KEY=VALUE, such as max_num_seqs=8", file=ENGINE_ARG, value=pair)
        try:
            parsed[ALIASES.get(name, name)] = json.loads(value)
        except ValueError:
            parsed[ALIASES.get(name, name)] = value
    return parsed


def apply_engine_args(tree: Tree, arguments: Mapping[str, Any], warnings: list[str]) -> Tree:
    """Lay command-line engine arguments over all stages they are for."""
    tree = Tree(dict(tree.data), tree.origins.copy())
    ignored: dict[str, list[str]] = {}
    for index, stage in enumerate(_stages(tree)):
        own = stage.get("engine_args") or {}
        values = {}
        for name, value in arguments.items():
            if name in FILL_DIFFUSION and name not in VLLM_DEFAULTS and stage.get("stage_type") != "diffusion":
                continue
            if name in ALWAYS_KEPT:
                values[name] = value
            elif name in own:
                if own[name] != value and not _says_nothing(name, value):
                    ignored.setdefault(name, []).append(str(stage.get("name", index)))
            elif not _says_nothing(name, value):
                values[name] = value
        if values:
            brought = from_flag({"engine_args": values}, ENGINE_ARG)
            patch_stage(tree, index, brought.data, brought.origins, ())
    if ignored:
        named = ", ".join(f"{name} ({', '.join(stages)})" for name, stages in sorted(ignored.items()))
        warnings.append(f"{ENGINE_ARG}: left out where the pipeline file gives the stage its own value: {named}")
    return tree


def apply_stage_overrides(tree: Tree, overrides: Mapping[str, Mapping[str, Any]]) -> Tree:
    """Lay per-stage overrides over everything else. Flat engine arguments are told from stage fields by their name.

    Raises:
        ConfigError: a stage that is not there, or a field that looks like a misspelt one.
    """
    tree = Tree(dict(tree.data), tree.origins.copy())
    origin = Origin(STAGE_OVERRIDES)
    for wanted, values in overrides.items():
        index = find_stage(_stages(tree), wanted, source=STAGE_OVERRIDES, path=str(wanted))
        nested: dict[str, Any] = {}
        for key, value in values.items():
            if key == "engine_args" and isinstance(value, Mapping):
                nested.setdefault("engine_args", {}).update(value)
            elif key in Stage.model_fields:
                nested[key] = value
            elif near := suggest(key, Stage.model_fields):
                raise ConfigError("unknown key", file=STAGE_OVERRIDES, path=f"{wanted}.{key}", hint=near)
            else:
                nested.setdefault("engine_args", {})[ALIASES.get(key, key)] = value
        brought = from_flag(nested, str(origin))
        patch_stage(tree, index, brought.data, brought.origins, ())
    return tree


def _stages(tree: Tree) -> list[Mapping[str, Any]]:
    """The stages, unless they are something else: validation says so then."""
    stages = tree.data.get("stages")
    return stages if isinstance(stages, list) and all(isinstance(stage, Mapping) for stage in stages) else []


def _says_nothing(name: str, value: object) -> bool:
    return name in VLLM_DEFAULTS and VLLM_DEFAULTS[name] == value and type(VLLM_DEFAULTS[name]) is type(value)


def _parse_json(text: str, flag: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        where = f"character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else "somewhere"
        near = text[max(0, error.pos - 12) : error.pos + 12] if isinstance(error, json.JSONDecodeError) else ""
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ConfigError(f"not JSON at {where} (near {near!r}): {reason}", file=flag) from None

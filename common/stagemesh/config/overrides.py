"""What the command line lays over a pipeline: engine arguments for all stages, and values for one stage.

Precedence, from the weakest: default, pipeline file, deploy overlay, engine argument of the command line, override of
a stage. An engine argument is for all stages at once, so a pipeline file that gives a stage its own value is more
specific: there the argument is left out, with one warning that names it, unless it is in `ALWAYS_KEPT`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import yaml

from stagemesh.config.errors import ConfigError, suggest
from stagemesh.config.foreign import LLM_ONLY
from stagemesh.config.merge import find_stage, from_flag, patch_stage
from stagemesh.config.model import Runtime, Stage
from stagemesh.config.origins import Tree
from stagemesh.config.read import PipelineLoader
from stagemesh.config.shape import MAPPINGS

STAGE_OVERRIDES, ENGINE_ARG, DEFAULT_SAMPLING = "--stage-overrides", "--engine-arg", "--default-sampling-params"
ALWAYS_KEPT = frozenset(
    {"worker_extension_cls", "allowed_local_media_path", "allowed_media_domains", "tensor_parallel_size"}
)
"""Engine arguments of the command line that win over a stage's own."""

VLLM_DEFAULTS: Mapping[str, Any] = {
    "gpu_memory_utilization": 0.92,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "load_format": "auto",
    "enforce_eager": False,
    "trust_remote_code": False,
    "enable_sleep_mode": False,
    "enable_lora": False,
    "max_loras": 1,
    "max_lora_rank": 16,
    "allowed_local_media_path": "",
    "worker_extension_cls": "",
    "quantization": None,
    "max_num_seqs": None,
    "max_num_batched_tokens": None,
    "enable_prefix_caching": None,
    "enable_chunked_prefill": None,
    "distributed_executor_backend": None,
    "seed": 0,
}
"""Defaults of vLLM's own arguments; a test holds them against vLLM. An argument that says no more is not applied."""

FILL_ALL = ("enable_sleep_mode",)
FILL_DIFFUSION = (
    "lora_path", "lora_scale", "attention_backend", "attention_config", "diffusion_attention_config", "quantization",
    "quantization_config", "kv_cache_dtype", "kv_cache_skip_steps", "kv_cache_skip_layers", "additional_config",
    "profiler_config", "enable_profiler",
)  # fmt: skip
"""Arguments that only fill what a stage leaves unset: in all stages, and in diffusion stages."""
DIFFUSION_ONLY = frozenset(
    {"lora_path", "lora_scale", "kv_cache_skip_steps", "kv_cache_skip_layers", "diffusion_attention_config"}
)
ALIASES = {"static_lora_scale": "lora_scale", "diffusion_attention_backend": "attention_backend"}


def parse_stage_overrides(text: str) -> dict[str, dict[str, Any]]:
    """The value of --stage-overrides. Raises ConfigError that says where the JSON breaks."""
    return parse_by_stage(text, STAGE_OVERRIDES, '{"painter": {"runtime": {"num_replicas": 2}}}')


def parse_default_sampling(text: str) -> dict[str, dict[str, Any]]:
    """The value of --default-sampling-params. Raises ConfigError that says where the JSON breaks."""
    return parse_by_stage(text, DEFAULT_SAMPLING, '{"0": {"max_tokens": 64}}')


def parse_by_stage(text: str, flag: str, example: str) -> dict[str, dict[str, Any]]:
    """A JSON object of objects, by stage id or name. Raises ConfigError that says where the JSON breaks."""
    try:
        parsed = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 12) : error.pos + 12]
        problem = f"not JSON at character {error.pos + 1} (near {near!r}): {error.msg}"
        raise ConfigError(problem, file=flag) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", file=flag) from None
    if not isinstance(parsed, dict) or not all(isinstance(value, dict) for value in parsed.values()):
        raise ConfigError(f"want an object of objects, by stage id or name: {example}", file=flag, value=parsed)
    return parsed


def parse_engine_args(pairs: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` words; a value is read as in a pipeline file. Raises ConfigError."""
    parsed: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        name = key.strip().removeprefix("--").replace("-", "_")
        if not separator or not name.isidentifier():
            raise ConfigError("want KEY=VALUE, such as max_num_seqs=8", file=ENGINE_ARG, value=pair)
        try:
            parsed[ALIASES.get(name, name)] = yaml.load(value, PipelineLoader)
        except (yaml.YAMLError, ValueError, RecursionError):
            parsed[ALIASES.get(name, name)] = value
    return parsed


def apply_engine_args(
    tree: Tree, arguments: Mapping[str, Any], warnings: list[str], overlay_sources: Collection[str] = ()
) -> Tree:
    """Lay command-line engine arguments over all stages they are for.

    Args:
        overlay_sources: files whose values are those of a deploy overlay, which an argument wins over.
    """
    tree = Tree(dict(tree.data), tree.origins.copy())
    left_out: dict[str, list[str]] = {}
    for index, stage in enumerate(tree.data.get("stages") or []):
        own = stage.get("engine_args") or {}
        values = {}
        for name, value in arguments.items():
            if not _is_for(stage, name):
                continue
            origin = tree.origins[("stages", index, "engine_args", name)]
            is_from_file = name in own and origin.source not in overlay_sources
            if name in ALWAYS_KEPT:
                values[name] = value
            elif name in own and _only_fills(stage, name):
                continue
            elif is_from_file:
                if own[name] != value and not says_nothing(name, value):
                    left_out.setdefault(name, []).append(str(stage.get("name", index)))
            elif name in own or not says_nothing(name, value):
                values[name] = value
        if values:
            patch_stage(tree, index, {"engine_args": values}, from_flag(ENGINE_ARG), ())
    if left_out:
        named = ", ".join(f"{name} ({', '.join(stages)})" for name, stages in sorted(left_out.items()))
        warnings.append(
            f"{ENGINE_ARG}: left out where the pipeline file gives the stage its own value: {named}; "
            f"{STAGE_OVERRIDES} wins over it"
        )
    return tree


def apply_stage_overrides(tree: Tree, overrides: Mapping[str, Mapping[str, Any]]) -> Tree:
    """Lay per-stage overrides over everything else. Flat engine arguments are told from stage fields by their name.

    Raises:
        ConfigError: a stage that is not there, a field that looks like a misspelt one, or no mapping.
    """
    tree = Tree(dict(tree.data), tree.origins.copy())
    for wanted, values in overrides.items():
        if not isinstance(values, Mapping):
            raise ConfigError("want a mapping", file=STAGE_OVERRIDES, path=str(wanted), value=values)
        index = find_stage(tree.data.get("stages") or [], wanted, source=STAGE_OVERRIDES, path=str(wanted))
        patch_stage(tree, index, _sorted_in(values, str(wanted)), from_flag(STAGE_OVERRIDES), ())
    return tree


def says_nothing(name: str, value: object) -> bool:
    """Whether an argument equals vLLM's default."""
    return name in VLLM_DEFAULTS and VLLM_DEFAULTS[name] == value and type(VLLM_DEFAULTS[name]) is type(value)


def _sorted_in(values: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Where each key of an override belongs: the stage, its runtime, or its engine."""
    patch: dict[str, Any] = {}
    for key, value in values.items():
        if key in MAPPINGS:
            if not isinstance(value, Mapping):
                raise ConfigError("want a mapping", file=STAGE_OVERRIDES, path=f"{stage}.{key}", value=value)
            patch[key] = {**patch.get(key, {}), **value}
        elif key in Stage.model_fields:
            patch[key] = value
        elif key in Runtime.model_fields:
            patch["runtime"] = {**patch.get("runtime", {}), key: value}
        elif near := suggest(key, [*Stage.model_fields, *Runtime.model_fields], cutoff=0.8):
            raise ConfigError("unknown key", file=STAGE_OVERRIDES, path=f"{stage}.{key}", hint=near)
        else:
            patch["engine_args"] = {**patch.get("engine_args", {}), ALIASES.get(key, key): value}
    return patch


def _is_for(stage: Mapping[str, Any], name: str) -> bool:
    """Whether an argument for all stages is for this one: not what only the other kind of engine has."""
    kind = stage.get("stage_type", "llm")
    if kind == "diffusion":
        return name not in LLM_ONLY
    return kind != "llm" or name not in DIFFUSION_ONLY


def _only_fills(stage: Mapping[str, Any], name: str) -> bool:
    return name in FILL_ALL or (name in FILL_DIFFUSION and stage.get("stage_type") == "diffusion")


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")

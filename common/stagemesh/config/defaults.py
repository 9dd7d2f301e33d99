"""A pipeline without a file: what `stagemesh up --model DIR` serves."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagemesh.config.errors import ConfigError
from stagemesh.config.origins import Origin, Origins, Tree

CACHE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cache_dit": {
        "fn_compute_blocks": 1, "bn_compute_blocks": 0, "max_warmup_steps": 4, "residual_diff_threshold": 0.24,
        "max_continuous_cached_steps": 3,
    },
    "tea_cache": {"rel_l1_thresh": 0.2},
    "mag_cache": {"threshold": 0.24, "max_skip_steps": 5, "retention_ratio": 0.1},
}  # fmt: skip
"""Settings of the cache backends when `cache_backend` names one without `cache_config`."""
AUDIO_HINTS = ("audio", "musicldm")
"""Parts of the class names of pipelines that make sound."""


def default_tree(
    model: Path, engine_args: dict[str, Any], default_sampling_params: Mapping[str, Mapping[str, Any]]
) -> Tree:
    """One stage for a model's folder: diffusers (`model_index.json`) or Hugging Face (`config.json`).

    Raises:
        ConfigError: the folder is neither.
    """
    if (model / "model_index.json").is_file():
        stage = _diffusion_stage(model, engine_args)
    elif (model / "config.json").is_file():
        stage = {"name": "llm", "stage_type": "llm", "engine_args": engine_args, "final_output_type": "text"}
        if _has_chat_template(model):
            stage["input_adapter"] = "chat"
    else:
        what = "is no folder" if not model.is_dir() else "has neither model_index.json nor config.json"
        raise ConfigError(
            what, file="--model", value=str(model), hint="want a diffusers folder or a Hugging Face model folder"
        )
    unknown = [key for key in default_sampling_params if key not in ("0", stage["name"])]
    if unknown:
        raise ConfigError("the pipeline has one stage, 0", file="--default-sampling-params", value=unknown[0])
    for values in default_sampling_params.values():
        stage["default_sampling_params"] = dict(values)
    name = re.sub(r"[^a-z0-9]+", "-", model.resolve().name.lower()).strip("-")[:63].rstrip("-") or "model"
    stage |= {"model": str(model.resolve()), "final_output": True}
    return Tree({"name": name, "stages": [stage]}, Origins({(): Origin("--model")}))


def _diffusion_stage(model: Path, engine_args: dict[str, Any]) -> dict[str, Any]:
    arguments = {"max_num_seqs": 1, "dtype": "auto", **engine_args}
    parallel = dict(arguments.get("parallel_config") or {})
    if parallel and "sequence_parallel_size" not in parallel:
        parallel["sequence_parallel_size"] = parallel.get("ulysses_degree", 1) * parallel.get("ring_degree", 1)
        arguments["parallel_config"] = parallel
    backend = arguments.get("cache_backend")
    if backend is not None:
        if backend not in CACHE_DEFAULTS:
            raise ConfigError(f"want one of {', '.join(CACHE_DEFAULTS)}", path="cache_backend", value=backend)
        arguments.setdefault("cache_config", dict(CACHE_DEFAULTS[backend]))
    try:
        kind = str(json.loads((model / "model_index.json").read_text()).get("_class_name", ""))
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"model_index.json cannot be read: {error}", file=str(model)) from None
    makes_sound = any(hint in kind.lower() for hint in AUDIO_HINTS)
    return {
        "name": "diffusion",
        "stage_type": "diffusion",
        "engine_args": arguments,
        "final_output_type": "audio" if makes_sound else "image",
    }


def _has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").is_file() or (model / "chat_template.json").is_file():
        return True
    try:
        return bool(json.loads((model / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False

"""A pipeline without a file: what `stagemesh up --model DIR` serves."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagemesh.config.errors import ConfigError
from stagemesh.config.origins import Origin, Origins, Tree
from stagemesh.config.overrides import ALIASES, DEFAULT_SAMPLING, ENGINE_ARG
from stagemesh.config.resolve import label_of

CACHE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cache_dit": {
        "Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 4, "residual_diff_threshold": 0.24,
        "max_continuous_cached_steps": 3,
    },
    "tea_cache": {"rel_l1_thresh": 0.2},
    "mag_cache": {"threshold": 0.24, "max_skip_steps": 5, "retention_ratio": 0.1},
}  # fmt: skip
"""Settings of a cache backend that is named without `cache_config`."""
PARALLEL = (
    "ulysses_degree", "ring_degree", "cfg_parallel_size", "tensor_parallel_size", "pipeline_parallel_size",
    "data_parallel_size", "sequence_parallel_size", "vae_patch_parallel_size",
)  # fmt: skip
"""Arguments of a diffusion model that stand in its `parallel_config`."""
SOUND = re.compile(r"audio|music|speech|tts|dance", re.IGNORECASE)
"""In the class names of diffusers' pipelines that make sound."""
FILM = re.compile(r"video|wan(?!d)|ltx|mochi|animatediff|textto.*synth|latte", re.IGNORECASE)
"""In the class names of those that make films."""
FLAG = "--model"


def default_tree(
    model: str, engine_args: Mapping[str, Any], default_sampling_params: Mapping[str, Mapping[str, Any]]
) -> Tree:
    """One stage for a model: diffusers (`model_index.json`) or Hugging Face (`config.json`).

    Args:
        model: a folder, or the name of a model in this machine's Hugging Face cache.
        default_sampling_params: by the stage's id or name.

    Raises:
        ConfigError: the folder is neither.
    """
    folder = _folder_of(model)
    arguments = {ALIASES.get(name, name): value for name, value in engine_args.items()}
    if (folder / "model_index.json").is_file():
        stage = _diffusion_stage(folder, arguments)
    elif (folder / "config.json").is_file():
        stage = {"name": "llm", "stage_type": "llm", "engine_args": arguments, "final_output_type": "text"}
        if _has_chat_template(folder):
            stage["input_adapter"] = "chat"
    else:
        hint = "want a diffusers folder or a Hugging Face model folder"
        raise ConfigError("has neither model_index.json nor config.json", file=FLAG, value=model, hint=hint)
    stage |= {"model": str(folder.resolve()), "final_output": True}
    origins = Origins({(): Origin(FLAG)})
    for name in engine_args:
        origins[("stages", 0, "engine_args", ALIASES.get(name, name))] = Origin(ENGINE_ARG)
    for key, values in default_sampling_params.items():
        if key not in ("0", stage["name"]):
            hint = f"the pipeline has one stage, 0 ({stage['name']})"
            raise ConfigError("there is no such stage", file=DEFAULT_SAMPLING, value=key, hint=hint)
        stage["default_sampling_params"] = dict(values)
        origins[("stages", 0, "default_sampling_params")] = Origin(DEFAULT_SAMPLING)
    return Tree({"name": _name_of(model, folder), "stages": [stage]}, origins)


def _diffusion_stage(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {"max_num_seqs": 1, "dtype": "auto", **given}
    parallel = dict(arguments.get("parallel_config") or {})
    parallel |= {name: arguments.pop(name) for name in PARALLEL if name in arguments}
    if parallel:
        sequence = parallel.get("ulysses_degree", 1) * parallel.get("ring_degree", 1)
        parallel.setdefault("sequence_parallel_size", sequence)
        arguments["parallel_config"] = parallel
    backend = str(arguments.get("cache_backend"))
    if backend in CACHE_DEFAULTS:
        arguments.setdefault("cache_config", dict(CACHE_DEFAULTS[backend]))
    return {
        "name": "diffusion",
        "stage_type": "diffusion",
        "engine_args": arguments,
        "final_output_type": _output_of(folder),
    }


def _output_of(folder: Path) -> str:
    """What a diffusers pipeline makes, by its class."""
    index = folder / "model_index.json"
    try:
        written = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be read: {error}", file=str(index)) from None
    kind = str(written.get("_class_name", "")) if isinstance(written, dict) else ""
    if SOUND.search(kind):
        return "audio"
    return "video" if FILM.search(kind) else "image"


def _folder_of(model: str) -> Path:
    """The folder of a model: itself, or where the Hugging Face cache of this machine has it."""
    try:
        folder = Path(model).expanduser()
        if folder.is_dir():
            return folder
        cached = _cached(model)
    except (OSError, RuntimeError, ValueError):
        cached = None
    if cached is None:
        hint = "want a folder; a model of the hub must have been downloaded before (`hf download NAME`)"
        raise ConfigError("there is no such folder", file=FLAG, value=model, hint=hint)
    return cached


def _cached(model: str) -> Path | None:
    if model.count("/") != 1 or model.startswith((".", "/")):
        return None
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    entry = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{model.replace('/', '--')}"
    revision = (entry / "refs/main").read_text().strip()
    snapshot = entry / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None


def _name_of(model: str, folder: Path) -> str:
    written = Path(model).expanduser()
    name = written.resolve().name if written.is_dir() else model.rpartition("/")[2]
    return label_of(name) or label_of(folder.name) or "model"


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return False

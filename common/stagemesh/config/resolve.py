"""Resolve: fill what a file may leave out."""

from __future__ import annotations

import re
from pathlib import Path as FilePath
from typing import Any

from stagemesh.config.compat import STREAMS
from stagemesh.config.dotted import code_file
from stagemesh.config.errors import ConfigError
from stagemesh.config.origins import DEFAULT, Path, Tree

PATH_ARGUMENTS = ("lora_path", "allowed_local_media_path")
"""Engine arguments that are paths."""
_SURELY_A_PATH = ("./", "../", "~/")
_HALVES = ("is_prefill_only", "is_decode_only")
CODE_FIELDS = ("engine", "input_adapter", "prompt_expand")
"""Fields of a stage that may name code as `file.py:name`."""


def resolve(tree: Tree, file: FilePath) -> Tree:
    """Fill name, ids, inputs, outputs and edges, and make paths absolute.

    Raises:
        ConfigError: there are no stages.
    """
    written = tree.data.get("stages")
    if not written:
        hint = "a pipeline file is a mapping with a list of `stages`"
        raise ConfigError("the pipeline has no stages", file=str(file), path="stages", hint=hint)
    data, origins = dict(tree.data), tree.origins.copy()
    streams = data.pop(STREAMS, None)
    if data.get("name") is None:
        data["name"] = label_of(file.stem) or "pipeline"
        origins[("name",)] = DEFAULT
    stages: list[dict[str, Any]] = [{k: v for k, v in stage.items() if v is not None} for stage in written]

    def fill(index: int, key: str, value: object) -> None:
        """Give a stage a value that nobody wrote."""
        if key not in stages[index]:
            stages[index][key] = value
            origins[("stages", index, key)] = DEFAULT

    for index in range(len(stages)):
        fill(index, "stage_id", index)
        fill(index, "name", f"stage-{index}")
    names = {str(stage["stage_id"]): stage["name"] for stage in reversed(stages)}
    for index, stage in enumerate(stages):
        fill(index, "inputs", [stages[index - 1]["name"]] if index else [])
        inputs = stage["inputs"]
        if isinstance(inputs, str | int):
            inputs = [inputs]
        if isinstance(inputs, list):
            stage["inputs"] = [_input_name(one, names) for one in inputs]
        if stage["inputs"] and not stage.get("is_decode_only"):
            fill(index, "media_inputs", [])
        needs_whole = stage.get("stage_type", "llm") == "diffusion" or any(stage.get(half) for half in _HALVES)
        if streams is not None and stage["inputs"] and not needs_whole:
            fill(index, "edge", "stream" if streams else "whole")
        _make_paths_absolute(stage, ("stages", index), Tree(data, origins), file)
    prefill, decode = (next((i for i, stage in enumerate(stages) if stage.get(half)), None) for half in _HALVES)
    if prefill is not None and decode is not None:
        for key in ("input_adapter", "adapter_args", "media_inputs"):  # both read the same prompt
            if key in stages[prefill]:
                fill(decode, key, stages[prefill][key])
    read = [name for stage in stages if isinstance(stage["inputs"], list) for name in stage["inputs"]]
    for index, stage in enumerate(stages):
        fill(index, "final_output", stage["name"] not in read)
    data["stages"] = stages
    return Tree(data, origins)


def label_of(text: str) -> str:
    """A name for people as an RFC-1123 label; may be empty."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].rstrip("-")


def _input_name(one: Any, names: dict[str, Any]) -> Any:
    """An id becomes the name; a name stays, and so does what is neither, for validation to refuse."""
    if isinstance(one, bool) or not isinstance(one, str | int):
        return one
    return names.get(str(one), str(one))


def _make_paths_absolute(stage: dict[str, Any], at: Path, tree: Tree, file: FilePath) -> None:
    """Paths are relative to the file that they are written in; what is no path there (a name on a hub) stays."""

    def folder_of(path: Path) -> FilePath:
        source = tree.origins[path].source
        if source.startswith("--"):  # what came by a flag is relative to where the command runs
            return FilePath.cwd()
        return file.parent if source == "default" else FilePath(source).parent

    def absolute(value: object, path: Path) -> object:
        if not isinstance(value, str) or not value:
            return value
        try:
            candidate = folder_of(path) / (FilePath(value).expanduser() if value.startswith("~/") else value)
            if value.startswith(_SURELY_A_PATH) or candidate.exists():
                return str(candidate.resolve())
        except (OSError, RuntimeError, ValueError):
            pass  # no path that this system could have
        return value

    stage["model"] = absolute(stage.get("model", ""), (*at, "model"))
    if not stage["model"]:
        del stage["model"]
    for key in CODE_FIELDS:
        in_file = code_file(code) if isinstance(code := stage.get(key), str) else None
        if in_file is not None:
            stage[key] = f"{(folder_of((*at, key)) / in_file[0]).resolve()}:{in_file[1]}"
    for field, names in (("lora_modules", None), ("engine_args", PATH_ARGUMENTS)):
        values = stage.get(field)
        if isinstance(values, dict):
            stage[field] = {
                name: absolute(value, (*at, field, name)) if names is None or name in names else value
                for name, value in values.items()
            }

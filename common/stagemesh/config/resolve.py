"""Resolve: fill what a file may leave out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from stagemesh.config.errors import ConfigError
from stagemesh.config.origins import DEFAULT, Tree


def resolve(tree: Tree, file: FilePath) -> Tree:
    """Fill name, ids, inputs, outputs and edges, and make paths absolute.

    Raises:
        ConfigError: there are no stages, or one is no mapping.
    """
    source, written = str(file), tree.data.get("stages")
    if not isinstance(written, list) or not written:
        raise ConfigError("a pipeline needs a list of stages", file=source, path="stages", value=written)
    data, origins = dict(tree.data), tree.origins.copy()
    streams = bool(data.pop("async_chunk", False))
    if data.get("name") is None:
        data["name"] = re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-")[:63].rstrip("-") or "pipeline"
        origins[("name",)] = DEFAULT
    stages = []
    for index, stage in enumerate(written):
        if not isinstance(stage, Mapping):
            raise ConfigError("want a mapping", file=source, path=f"stages[{index}]", value=stage)
        stages.append({key: value for key, value in stage.items() if value is not None})

    def fill(index: int, key: str, value: object) -> None:
        """Give a stage a value that nobody wrote."""
        if key not in stages[index]:
            stages[index][key] = value
            origins[("stages", index, key)] = DEFAULT

    for index in range(len(stages)):
        fill(index, "stage_id", index)
        fill(index, "name", f"stage-{stages[index]['stage_id']}")
    names = {str(stage["stage_id"]): str(stage["name"]) for stage in stages}
    for index, stage in enumerate(stages):
        fill(index, "inputs", [stages[index - 1]["name"]] if index else [])
        inputs = stage["inputs"]
        if isinstance(inputs, str | int):
            inputs = [inputs]
        if isinstance(inputs, list):
            stage["inputs"] = [names.get(str(item), str(item)) for item in inputs]
        if streams and stage.get("inputs"):
            fill(index, "edge", "stream")
        _absolute_paths(stage, lambda *path, index=index: origins[("stages", index, *path)].source, file)
    read = {name for stage in stages for name in _texts(stage.get("inputs"))}
    for index, stage in enumerate(stages):
        fill(index, "final_output", stage["name"] not in read)
    data["stages"] = stages
    return Tree(data, origins)


def _absolute_paths(stage: dict[str, Any], source_of: Any, file: FilePath) -> None:
    """Paths are relative to the file that they are written in; what is no path there (a name on a hub) stays."""

    def absolute(value: object, *path: str) -> object:
        if not isinstance(value, str) or not value:
            return value
        source = FilePath(source_of(*path))
        folder = source.parent if source.is_file() else file.parent
        candidate = folder / FilePath(value).expanduser()
        return str(candidate.resolve()) if candidate.exists() else value

    if "model" in stage:
        stage["model"] = absolute(stage["model"], "model")
    modules = stage.get("lora_modules")
    if isinstance(modules, Mapping):
        stage["lora_modules"] = {name: absolute(path, "lora_modules", str(name)) for name, path in modules.items()}


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []

"""From a pipeline file to a frozen `Pipeline`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from stagemesh.config.errors import ConfigError, suggest
from stagemesh.config.model import Pipeline, Runtime, Stage


def load_pipeline(path: str | Path) -> Pipeline:
    """Read, resolve and validate a pipeline file. Raises ConfigError."""
    path = Path(path)
    tree = read_yaml(path)
    tree.setdefault("name", re.sub(r"[^a-z0-9-]+", "-", path.stem.lower()).strip("-") or "pipeline")
    try:
        return build(resolve(tree, path.parent))
    except ConfigError as error:
        raise error.at(str(path)) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as plain data, with OmegaConf's interpolations resolved. Raises ConfigError."""
    try:
        text = path.read_text()
        loaded = OmegaConf.to_container(OmegaConf.create(yaml.safe_load(text) or {}), resolve=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", file=str(path)) from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(str(error).replace("\n", " "), file=str(path)) from None
    if not isinstance(loaded, dict):
        raise ConfigError("a pipeline file is a mapping with `stages`", file=str(path))
    return {str(key): value for key, value in loaded.items()}


def resolve(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Fill what a file may leave out: ids, inputs, outputs, absolute model paths."""
    stages = [dict(stage) for stage in tree.get("stages") or []]
    for index, stage in enumerate(stages):
        stage.setdefault("stage_id", index)
    names = {str(stage["stage_id"]): str(stage.get("name")) for stage in stages}
    for index, stage in enumerate(stages):
        inputs = stage.get("inputs")
        if inputs is None:
            inputs = [stages[index - 1].get("name")] if index else []
        stage["inputs"] = [names.get(str(item), str(item)) for item in inputs]
        model = stage.get("model")
        if isinstance(model, str) and (folder / model).exists():
            stage["model"] = str((folder / model).resolve())
    read = {name for stage in stages for name in stage["inputs"]}
    for stage in stages:
        stage.setdefault("final_output", stage.get("name") not in read)
    return {**tree, "stages": stages}


def build(tree: Mapping[str, Any]) -> Pipeline:
    """Validate a resolved tree. Raises ConfigError that names the path."""
    try:
        return Pipeline.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        hint = ""
        if first["type"] == "extra_forbidden":
            known = {*Pipeline.model_fields, *Stage.model_fields, *Runtime.model_fields}
            hint = suggest(str(first["loc"][-1]), known)
            raise ConfigError("unknown key", path=path, hint=hint) from None
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(message, path=path, value=first["input"], hint=hint) from None

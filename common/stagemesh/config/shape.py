"""The outer shape of a tree: a list of stages that are mappings. The steps between load and validate count on it."""

from __future__ import annotations

from typing import Any

from stagemesh.config.errors import ConfigError
from stagemesh.config.origins import Path, Tree, show_path

MAPPINGS = ("runtime", "engine_args", "default_sampling_params", "adapter_args", "limits", "lora_modules")
"""Fields of a stage that hold mappings."""


def checked_shape(tree: Tree) -> Tree:
    """The tree with its empty mappings (`runtime:` with nothing below) left out.

    Raises:
        ConfigError: `stages` is no list of mappings, or a field that holds a mapping holds something else.
    """
    stages = tree.data.get("stages")
    if stages is None:
        return tree
    source = str(tree.origins[("stages",)])
    if not isinstance(stages, list):
        raise ConfigError("want a list of stages", file=source, path="stages", value=stages)
    checked = [_stage(tree, index, stage) for index, stage in enumerate(stages)]
    return Tree({**tree.data, "stages": checked}, tree.origins)


def _stage(tree: Tree, index: int, stage: Any) -> dict[str, Any]:
    path: Path = ("stages", index)
    if not isinstance(stage, dict):
        problem, where = "want a mapping with `name`, `model` and so on", str(tree.origins[path])
        raise ConfigError(problem, file=where, path=show_path(path), value=stage)
    for key in MAPPINGS:
        value = stage.get(key)
        if value is not None and not isinstance(value, dict):
            where = str(tree.origins[(*path, key)])
            raise ConfigError("want a mapping", file=where, path=show_path((*path, key)), value=value)
    return {key: value for key, value in stage.items() if value is not None or key not in MAPPINGS}

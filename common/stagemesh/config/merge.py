"""Merge: values laid over one stage of a tree, keeping where each came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stagemesh.config.errors import ConfigError, suggest
from stagemesh.config.origins import Origin, Origins, Path, Tree


def patch_stage(tree: Tree, index: int, values: Mapping[str, Any], origins: Origins, at: Path) -> None:
    """Lay `values` over stage `index` of `tree`, in place; their origins are those of `origins` below `at`.

    Mappings merge key by key, at any depth; everything else is replaced.
    """
    stages = list(tree.data["stages"])
    stages[index] = dict(stages[index])
    tree.data["stages"] = stages
    for key, value in values.items():
        _put(tree, stages[index], ("stages", index, key), value, origins, (*at, key))


def find_stage(stages: Sequence[Mapping[str, Any]], wanted: object, *, source: str, path: str) -> int:
    """Position of a stage by id or name. Raises ConfigError with the stages there are."""
    text = str(wanted)
    for index, stage in enumerate(stages):
        if text == str(stage.get("stage_id", index)) or text == stage.get("name", f"stage-{index}"):
            return index
    names = [str(stage.get("name", f"stage-{index}")) for index, stage in enumerate(stages)]
    there = ", ".join(f"{stage.get('stage_id', i)} ({names[i]})" for i, stage in enumerate(stages))
    hint = suggest(text, names) or (f"stages are {there}" if there else "it has no stages at all")
    raise ConfigError(f"the pipeline has no stage {text!r}", file=source, path=path, hint=hint)


def from_flag(flag: str) -> Origins:
    """Origins of values that a flag brought."""
    return Origins({(): Origin(flag)})


def _put(tree: Tree, holder: dict[str, Any], path: Path, value: Any, origins: Origins, at: Path) -> None:
    """Put `value` at `path` (whose mapping is `holder`), merging mappings."""
    key = path[-1]
    assert isinstance(key, str)
    old = holder.get(key)
    if isinstance(old, Mapping) and isinstance(value, Mapping):
        holder[key] = inner = dict(old)
        for name, item in value.items():
            _put(tree, inner, (*path, str(name)), item, origins, (*at, str(name)))
        return
    holder[key] = value
    tree.origins.replace_below(path, origins[at])
    for rest, origin in origins.below(at):
        if rest:
            tree.origins[(*path, *rest)] = origin

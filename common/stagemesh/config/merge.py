"""Merge: one tree over another, stage by stage, keeping origins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stagemesh.config.errors import ConfigError, suggest
from stagemesh.config.origins import Origin, Origins, Path, Tree, show_path


def merge_trees(base: Tree, over: Tree) -> Tree:
    """`over` laid over `base`: mappings merge, everything else is replaced, stages are matched by id or name.

    Raises:
        ConfigError: `over` has a stage that `base` has not.
    """
    merged = Tree(dict(base.data), base.origins.copy())
    for key, value in over.data.items():
        if key == "stages" and isinstance(base.data.get("stages"), list):
            _merge_stages(merged, value, over)
        else:
            _put(merged, merged.data, (key,), value, over.origins, (key,))
    return merged


def patch_stage(tree: Tree, index: int, values: Mapping[str, Any], origins: Origins, at: Path) -> None:
    """Lay `values` over stage `index` of `tree`, in place; their origins are those of `origins` below `at`."""
    stages = list(tree.data["stages"])
    stages[index] = dict(stages[index])
    tree.data["stages"] = stages
    for key, value in values.items():
        _put(tree, stages[index], ("stages", index, key), value, origins, (*at, key))


def find_stage(stages: Sequence[Mapping[str, Any]], wanted: object, *, source: str, path: str) -> int:
    """Position of a stage by id or name. Raises ConfigError with the stages there are."""
    for index, stage in enumerate(stages):
        if str(wanted) in (str(stage.get("name")), str(stage.get("stage_id", index))):
            return index
    names = [str(stage.get("name", index)) for index, stage in enumerate(stages)]
    hint = suggest(str(wanted), names) or f"stages are {', '.join(f'{i} ({n})' for i, n in enumerate(names))}"
    raise ConfigError("the pipeline has no such stage", file=source, path=path, value=wanted, hint=hint)


def _merge_stages(merged: Tree, patches: object, over: Tree) -> None:
    source = over.origins[("stages",)].source
    if not isinstance(patches, list) or not all(isinstance(patch, Mapping) for patch in patches):
        raise ConfigError("want a list of stages", file=source, path="stages", value=patches)
    for number, patch in enumerate(patches):
        path = ("stages", number)
        wanted = patch.get("stage_id", patch.get("name"))
        if wanted is None:
            raise ConfigError("a stage to merge names its stage_id or name", file=source, path=show_path(path))
        index = find_stage(merged.data["stages"], wanted, source=source, path=show_path(path))
        named = {"stage_id"} if "stage_id" in patch else {"name"}
        values = {key: value for key, value in patch.items() if key not in named}
        patch_stage(merged, index, values, over.origins, path)


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


def from_flag(values: Mapping[str, Any], flag: str) -> Tree:
    """Values that a flag brought, as a tree."""
    return Tree(dict(values), Origins({(): Origin(flag)}))

"""From files and flags to a frozen `Pipeline`: load, compat, merge, resolve, validate."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagemesh.config.compat import from_overlay, from_stage_args
from stagemesh.config.defaults import default_tree
from stagemesh.config.errors import ConfigError
from stagemesh.config.merge import merge_trees
from stagemesh.config.model import Pipeline
from stagemesh.config.origins import Tree
from stagemesh.config.overrides import apply_engine_args, apply_stage_overrides
from stagemesh.config.read import read_tree
from stagemesh.config.resolve import resolve
from stagemesh.config.validate import validate

log = logging.getLogger("stagemesh.config")

MAX_INHERITANCE = 8


@dataclass(frozen=True, slots=True)
class Loaded:
    """A pipeline, where its values came from, and what was worth a warning."""

    pipeline: Pipeline
    tree: Tree = field(repr=False)
    warnings: tuple[str, ...] = ()


def load_pipeline(
    path: str | Path,
    *,
    overlays: Sequence[str | Path] = (),
    stage_overrides: Mapping[str, Mapping[str, Any]] | None = None,
    engine_args: Mapping[str, Any] | None = None,
    platform: str = "",
) -> Pipeline:
    """Read a pipeline file and everything laid over it. Raises ConfigError. Warnings go to the log."""
    return _told(load(path, overlays=overlays, stage_overrides=stage_overrides, engine_args=engine_args,
                      platform=platform))  # fmt: skip


def default_pipeline(
    model: str | Path,
    *,
    overlays: Sequence[str | Path] = (),
    stage_overrides: Mapping[str, Mapping[str, Any]] | None = None,
    engine_args: Mapping[str, Any] | None = None,
    default_sampling_params: Mapping[str, Mapping[str, Any]] | None = None,
    platform: str = "",
) -> Pipeline:
    """A pipeline of one stage for a model's folder (`stagemesh up --model`). Raises ConfigError."""
    tree = default_tree(Path(model), dict(engine_args or {}), default_sampling_params or {})
    return _told(_finish(tree, Path(model), overlays, stage_overrides, {}, platform, []))


def load(
    path: str | Path,
    *,
    overlays: Sequence[str | Path] = (),
    stage_overrides: Mapping[str, Mapping[str, Any]] | None = None,
    engine_args: Mapping[str, Any] | None = None,
    platform: str = "",
) -> Loaded:
    """`load_pipeline` with the origins and the warnings. Raises ConfigError."""
    file, ignored = Path(path), list[str]()
    tree = _read_with_bases(file, platform, ignored)
    return _finish(tree, file, overlays, stage_overrides, engine_args or {}, platform, ignored)


def _finish(
    tree: Tree,
    file: Path,
    overlays: Sequence[str | Path],
    stage_overrides: Mapping[str, Mapping[str, Any]] | None,
    engine_args: Mapping[str, Any],
    platform: str,
    ignored: list[str],
) -> Loaded:
    warnings: list[str] = []
    for overlay in overlays:
        over = _read_with_bases(Path(overlay), platform, ignored, as_overlay=True)
        tree = merge_trees(tree, over)
    tree = apply_engine_args(tree, engine_args, warnings)
    tree = apply_stage_overrides(tree, stage_overrides or {})
    tree = resolve(tree, file)
    pipeline = validate(tree, str(file))
    if ignored:
        warnings.insert(0, f"{file}: has no meaning here and is left out: {', '.join(dict.fromkeys(ignored))}")
    return Loaded(pipeline, tree, tuple(warnings))


def _read_with_bases(file: Path, platform: str, ignored: list[str], *, as_overlay: bool = False) -> Tree:
    """A file over the files that its `base_config` names, the oldest first. Raises ConfigError."""
    chain: list[Tree] = []
    seen: list[Path] = []
    at: Path | None = file
    while at is not None:
        if at.resolve() in seen:
            raise ConfigError("base_config leads back to this file", file=str(at), path="base_config")
        if len(seen) >= MAX_INHERITANCE:
            raise ConfigError(f"base_config goes deeper than {MAX_INHERITANCE} files", file=str(at), path="base_config")
        seen.append(at.resolve())
        tree = read_tree(at)
        base = tree.data.pop("base_config", None)
        if base is not None and not isinstance(base, str):
            raise ConfigError("want the path of a file", file=str(at), path="base_config", value=base)
        chain.append(tree)
        at = at.parent / base if base else None
    merged: Tree | None = None
    for depth, tree in enumerate(reversed(chain)):
        one = from_stage_args(tree, ignored)
        # What lies over a pipeline has the overlay's form: flat engine arguments, sections by platform.
        if as_overlay or depth > 0:
            one = from_overlay(one, platform, ignored)
        merged = one if merged is None else merge_trees(merged, one)
    assert merged is not None
    return merged


def _told(loaded: Loaded) -> Pipeline:
    for warning in loaded.warnings:
        log.warning("%s", warning)
    return loaded.pipeline

"""From files and flags to a frozen `Pipeline`: load, compat, merge, resolve, validate."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

from stagemesh.config.compat import from_stage_args, is_stage_args
from stagemesh.config.defaults import default_tree
from stagemesh.config.errors import ConfigError
from stagemesh.config.merge import from_flag, patch_stage
from stagemesh.config.model import Pipeline
from stagemesh.config.origins import Origin, Tree
from stagemesh.config.overlay import check_platform, is_overlay, lay_common, lay_platform, share_listed_devices
from stagemesh.config.overrides import apply_engine_args, apply_stage_overrides
from stagemesh.config.read import read_tree
from stagemesh.config.resolve import resolve
from stagemesh.config.shape import checked_shape
from stagemesh.config.validate import validate

log = logging.getLogger("stagemesh.config")

MAX_INHERITANCE = 8
StageValues = Mapping[str, Mapping[str, Any]]
"""Values by stage id or name."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A pipeline, where its values came from, and what was worth a warning."""

    pipeline: Pipeline
    tree: Tree = field(repr=False)
    warnings: tuple[str, ...] = ()


class Layers(TypedDict, total=False):
    """What is laid over a pipeline file, the weakest first. None is as good as not there."""

    overlays: Sequence[str | Path] | None
    """Deploy overlays, in their order."""
    platform: str | None
    """Section of the overlays to use, such as "cuda"; none by default."""
    model: str | Path | None
    """For stages whose file names no model."""
    policy: str | None
    """Load balancing, over the file's."""
    stage_init_timeout: float | None
    """Seconds that a replica of any stage may take to become READY, over the file's."""
    engine_args: Mapping[str, Any] | None
    """Engine arguments for all stages."""
    stage_overrides: StageValues | None
    """Values of single stages, over everything else."""


def load(path: str | Path, **layers: Unpack[Layers]) -> Loaded:
    """`load_pipeline` with the origins and the warnings. Raises ConfigError."""
    _check_names(layers)
    file, ignored = Path(path), list[str]()
    root, *inherited = _chain(file)
    foreign = is_stage_args(root)
    if not foreign and is_overlay(root):
        hint = "lay it over one with --deploy-config, or let it name one as `base_config`"
        raise ConfigError("this is a deploy overlay, not a pipeline", file=str(file), hint=hint)
    tree = checked_shape(from_stage_args(root, ignored) if foreign else root)
    return _finish(tree, file, layers, ignored, inherited, is_foreign=foreign)


def load_pipeline(path: str | Path, **layers: Unpack[Layers]) -> Pipeline:
    """Read a pipeline file and what is laid over it. Warnings go to the log.

    Args:
        path: a pipeline file, of our form or of the `stage_args` form.
        layers: the fields of `Layers`, as keywords.

    Raises:
        ConfigError: naming file, line, path, value, and what would be right.
    """
    return _told(load(path, **layers))


def default_pipeline(
    model: str | Path, /, *, default_sampling_params: StageValues | None = None, **layers: Unpack[Layers]
) -> Pipeline:
    """A pipeline of one stage for a model's folder (`stagemesh up --model`), and what is laid over it.

    Raises:
        ConfigError: the folder is of no kind that there is an engine for, or as for `load_pipeline`.
    """
    _check_names(layers)
    tree = default_tree(str(model), layers.get("engine_args") or {}, default_sampling_params or {})
    return _told(_finish(tree, Path(model), layers, [], [], is_default=True))


def _check_names(layers: Layers) -> None:
    for name in layers:
        if name not in Layers.__annotations__:
            raise TypeError(f"{name!r} cannot be laid over a pipeline, but {', '.join(Layers.__annotations__)} can")


def _finish(
    tree: Tree,
    file: Path,
    laid: Layers,
    ignored: list[str],
    inherited: Sequence[Tree],
    *,
    is_foreign: bool = False,
    is_default: bool = False,
) -> Loaded:
    warnings: list[str] = []
    chains = [list(inherited), *(_chain(Path(overlay)) for overlay in laid.get("overlays") or ())]
    overlays = [one for chain in chains for one in chain]
    platform = laid.get("platform") or ""
    check_platform(platform, overlays)
    for chain in chains:
        # The platform's sections win over the common parts of all files that the overlay inherits from.
        for overlay in chain:
            common = from_stage_args(overlay, ignored) if is_stage_args(overlay) else overlay
            tree = lay_common(tree, common, ignored)
        for overlay in chain:
            tree = lay_platform(tree, overlay, platform, ignored)
    sources = {one.origins[()].source for one in overlays}
    tree = share_listed_devices(tree, sources | ({str(file)} if is_foreign else set()))
    tree = _lay_flags(tree, laid)
    if not is_default:  # there the arguments are the stage's own
        tree = apply_engine_args(tree, laid.get("engine_args") or {}, warnings, sources)
    tree = checked_shape(apply_stage_overrides(tree, laid.get("stage_overrides") or {}))
    tree = resolve(tree, file)
    pipeline = validate(tree, str(file), warnings, is_foreign=is_foreign)
    if ignored:
        warnings.insert(0, f"{file}: has no meaning here and is left out: {', '.join(dict.fromkeys(ignored))}")
    return Loaded(pipeline, tree, tuple(warnings))


def _lay_flags(tree: Tree, laid: Layers) -> Tree:
    """--model, --policy and --stage-init-timeout."""
    tree = Tree(dict(tree.data), tree.origins.copy())
    if policy := laid.get("policy"):
        routing = tree.data.get("routing")
        tree.data["routing"] = {**(routing if isinstance(routing, dict) else {}), "policy": policy}
        tree.origins[("routing", "policy")] = Origin("--policy")
    model, timeout = laid.get("model"), laid.get("stage_init_timeout")
    for index, stage in enumerate(tree.data.get("stages") or []):
        if model and not stage.get("model"):
            patch_stage(tree, index, {"model": str(model)}, from_flag("--model"), ())
        if timeout is not None:
            values = {"runtime": {"stage_init_timeout": timeout}}
            patch_stage(tree, index, values, from_flag("--stage-init-timeout"), ())
    return tree


def _chain(file: Path) -> list[Tree]:
    """A file and those that its `base_config` leads to, the oldest first. Raises ConfigError."""
    chain: list[Tree] = []
    seen: set[Path] = set()
    at: Path | None = file
    while at is not None:
        tree = read_tree(at)
        if at.resolve() in seen:
            raise ConfigError("leads in a circle", file=str(file), path="base_config", value=str(at))
        if len(seen) >= MAX_INHERITANCE:
            raise ConfigError(f"goes deeper than {MAX_INHERITANCE} files", file=str(file), path="base_config")
        seen.add(at.resolve())
        base = tree.data.pop("base_config", None)
        if base is not None and (not isinstance(base, str) or not base or "\0" in base):
            where = str(tree.origins[("base_config",)])
            raise ConfigError("want the path of a file", file=where, path="base_config", value=base)
        chain.append(tree)
        at = at.parent / base if base else None
        if at is not None and not os.path.isfile(at):  # Path.is_file raises for names that are too long
            where = str(tree.origins[("base_config",)])
            raise ConfigError("there is no such file", file=where, path="base_config", value=str(at))
    return chain[::-1]


def _told(loaded: Loaded) -> Pipeline:
    for warning in loaded.warnings:
        log.warning("%s", warning)
    return loaded.pipeline

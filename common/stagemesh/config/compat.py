"""Compat: files of vLLM-Omni's `stage_args` form, turned into ours.

That form says `engine_input_source` for inputs and `custom_process_input_func` for the adapter, puts the model and what
its engine alone knows into `engine_args`, and has the edges with their windows in a `runtime` of the whole file. What
has no meaning here is collected, for one warning that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from stagemesh.config.errors import ConfigError, suggest
from stagemesh.config.foreign import (
    LLM_ONLY,
    MEANINGLESS_ENGINE_ARGS,
    MEANINGLESS_RUNTIME,
    MEANINGLESS_SAMPLING,
    MEANINGLESS_STAGE,
    RENAMED,
    left_out,
)
from stagemesh.config.model import MediaKind, Runtime, Stage
from stagemesh.config.origins import Origins, Path, Tree, show_path
from stagemesh.config.sampling import known_parameters
from stagemesh.config.shape import MAPPINGS

STREAMS = "(async chunk)"
"""Key of a tree, which no file can hold, for "edges that say nothing are streams"."""
_OWN_TOP = ("name", "routing", "limits")


def is_stage_args(tree: Tree) -> bool:
    """Whether a file has the `stage_args` form."""
    return "stage_args" in tree.data


def from_stage_args(tree: Tree, ignored: list[str]) -> Tree:
    """A file of the `stage_args` form as one of ours; names without a meaning go to `ignored`. Raises ConfigError."""
    written = tree.data["stage_args"]
    source = str(tree.origins[("stage_args",)])
    if not isinstance(written, list) or not written:
        raise ConfigError("want a list of stages", file=source, path="stage_args", value=written)
    origins = Origins({(): tree.origins[()], ("stages",): tree.origins[("stage_args",)]})
    stages: list[dict[str, Any]] = []
    for index, raw in enumerate(written):
        where = str(tree.origins[("stage_args", index)])
        if not isinstance(raw, dict):
            raise ConfigError("want a mapping", file=where, path=f"stage_args[{index}]", value=raw)
        for key in MAPPINGS:
            if not isinstance(raw.get(key, {}), dict | None):
                raise ConfigError("want a mapping", file=where, path=f"stage_args[{index}].{key}", value=raw[key])
        for rest, origin in tree.origins.below(("stage_args", index)):
            moved = (RENAMED.get(str(rest[0]), rest[0]), *rest[1:]) if rest else rest
            origins[("stages", index, *moved)] = origin
        stages.append(_stage(raw, index, ignored))
    _make_names_unique(stages)
    data: dict[str, Any] = {"stages": stages, **{key: tree.data[key] for key in _OWN_TOP if key in tree.data}}
    for key in _OWN_TOP:
        for rest, origin in tree.origins.below((key,)):
            origins[(key, *rest)] = origin
    if tree.data.get("async_chunk"):
        data[STREAMS] = True
    known = {"stage_args", "runtime", "async_chunk", *_OWN_TOP}
    ignored.extend(sorted(key for key in tree.data if key not in known))
    _apply_runtime(data, tree, ignored)
    return Tree(data, origins)


def _stage(raw: Mapping[str, Any], index: int, ignored: list[str]) -> dict[str, Any]:
    at = f"stages[{index}]"
    stage: dict[str, Any] = {}
    for key, value in raw.items():
        name = RENAMED.get(key, key)
        if name in Stage.model_fields:
            stage[name] = value
        elif key in MEANINGLESS_STAGE or not suggest(key, [*Stage.model_fields, *RENAMED]):
            ignored.append(left_out(f"{at}.{key}", MEANINGLESS_STAGE.get(key, "")))
        else:  # misspelt: validation says what it may have been meant to be
            stage[key] = value
    arguments = dict(stage.get("engine_args") or {})
    if not stage.get("name"):
        stage["name"] = _label(arguments.get("model_stage"), stage.get("stage_id", index))
    if "model" in arguments:
        stage.setdefault("model", arguments.pop("model"))
    arguments.pop("model_stage", None)  # it became the name
    _leave_out(arguments, MEANINGLESS_ENGINE_ARGS, f"{at}.engine_args", ignored)
    if stage.get("stage_type") == "diffusion":
        leave_out_llm_arguments(arguments, f"{at}.engine_args", ignored)
    runtime = dict(stage.get("runtime") or {})
    if runtime.get("process") is False:
        ignored.append(f"{at}.runtime.process (a replica is always a process of its own)")
        del runtime["process"]
    if runtime.pop("requires_multimodal_data", False) is True:
        stage.setdefault("media_inputs", list(get_args(MediaKind)))
    known = Runtime.model_fields
    foreign = {key: "" for key in runtime if key not in known and not suggest(key, known)}
    _leave_out(runtime, {**foreign, **MEANINGLESS_RUNTIME}, f"{at}.runtime", ignored)
    stage |= {"engine_args": arguments, "runtime": runtime}
    if isinstance(stage.get("default_sampling_params"), dict):
        stage["default_sampling_params"] = own_sampling(
            stage["default_sampling_params"], str(stage.get("stage_type", "llm")), at, ignored
        )
    return stage


def own_sampling(given: Mapping[str, Any], stage_type: str, at: str, ignored: list[str]) -> dict[str, Any]:
    """Sampling parameters with what only the engine knows in `extra`."""
    params, known = dict(given), known_parameters(stage_type)
    _leave_out(params, MEANINGLESS_SAMPLING, f"{at}.default_sampling_params", ignored)
    engines = [name for name in params if name not in known and not suggest(name, known, cutoff=0.8)]
    extra = {name: params.pop(name) for name in engines}
    if extra:
        params["extra"] = {**(params.get("extra") or {}), **extra}
    return params


def leave_out_llm_arguments(arguments: dict[str, Any], at: str, ignored: list[str]) -> None:
    """Take what only vLLM knows from a diffusion stage's arguments."""
    _leave_out(arguments, dict.fromkeys(LLM_ONLY, "the diffusion engine has none"), at, ignored)


def _leave_out(values: dict[str, Any], names: Mapping[str, str], at: str, ignored: list[str]) -> None:
    for key in [key for key in values if key in names]:
        del values[key]
        ignored.append(left_out(f"{at}.{key}", names[key]))


def _apply_runtime(data: dict[str, Any], tree: Tree, ignored: list[str]) -> None:
    """The file's `runtime`: defaults and edges."""
    runtime = tree.data.get("runtime")
    if runtime is None:
        return
    source = str(tree.origins[("runtime",)])
    if not isinstance(runtime, dict):
        raise ConfigError("want a mapping", file=source, path="runtime", value=runtime)
    defaults = runtime.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise ConfigError("want a mapping", file=source, path="runtime.defaults", value=defaults)
    for key in sorted(runtime):
        if key not in ("defaults", "edges"):
            ignored.append(left_out(f"runtime.{key}", MEANINGLESS_RUNTIME.get(key, "")))
    for key in sorted(defaults):
        if key != "window_size":
            ignored.append(left_out(f"runtime.defaults.{key}", MEANINGLESS_RUNTIME.get(key, "")))
    by_id = {str(stage.get("stage_id", index)): stage for index, stage in enumerate(data["stages"])}
    edges = read_edges(tree, ("runtime", "edges"), by_id, defaults.get("window_size", -1), ignored)
    for target, (upstream, mode) in edges.items():
        stage = by_id[target]
        inputs = stage.get("inputs")
        written = list(inputs) if isinstance(inputs, list) else [] if inputs is None else [inputs]
        stage["inputs"] = written + [one for one in upstream if str(one) not in map(str, written)]
        stage["edge"] = mode


def read_edges(
    tree: Tree, path: Path, stages: Mapping[str, Any] | None, default_window: object, ignored: list[str]
) -> dict[str, tuple[list[Any], str]]:
    """Edges {from, to, window_size} by the stage they lead to: what it reads, and "whole" or "stream".

    Args:
        stages: known ids; None: not known yet.

    Raises:
        ConfigError: an edge of another form, or one that leads nowhere.
    """
    value: Any = tree.data
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        return {}
    if not isinstance(value, list):
        raise ConfigError("want a list of edges", file=str(tree.origins[path]), path=show_path(path), value=value)
    found: dict[str, tuple[list[Any], str]] = {}
    for number, edge in enumerate(value):
        at: Path = (*path, number)
        source = str(tree.origins[at])
        if not isinstance(edge, dict) or not {"from", "to"} <= set(edge):
            want = "an edge is {from, to, window_size}"
            raise ConfigError(want, file=source, path=show_path(at), value=edge)
        for end in ("from", "to"):
            if stages is not None and str(edge[end]) not in stages:
                hint = f"stages are {', '.join(stages)}"
                raise ConfigError(
                    "no stage has this id", file=source, path=show_path((*at, end)), value=edge[end], hint=hint
                )
        window = edge.get("window_size", default_window)
        if isinstance(window, bool) or not isinstance(window, int) or not (window == -1 or window >= 1):
            want = "want -1 (the whole output) or a number of chunks from 1"
            raise ConfigError(want, file=source, path=show_path((*at, "window_size")), value=window)
        ignored.extend(f"{show_path(at)}.{key}" for key in edge if key not in ("from", "to", "window_size"))
        upstream, mode = found.get(str(edge["to"]), ([], "whole"))
        # A stage has one mode for all it reads: one stream makes it start early.
        found[str(edge["to"])] = ([*upstream, edge["from"]], "whole" if window == -1 and mode == "whole" else "stream")
    return found


def _label(model_stage: object, stage_id: object) -> str:
    text = "".join(c if c.isalnum() and c.isascii() else "-" for c in str(model_stage or "").lower()).strip("-")
    return text[:63] or f"stage-{stage_id}"


def _make_names_unique(stages: list[dict[str, Any]]) -> None:
    """Both halves of a prefill/decode pair have the same `model_stage`: the later one gets its id behind the name."""
    seen: set[str] = set()
    for index, stage in enumerate(stages):
        name = str(stage["name"])
        if name in seen:
            stage["name"] = f"{name}-{stage.get('stage_id', index)}"
        seen.add(str(stage["name"]))

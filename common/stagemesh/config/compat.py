"""Compat: files of the `stage_args` form and deploy overlays, turned into ours.

The `stage_args` form describes a pipeline as vLLM-Omni does: `engine_input_source` for inputs,
`custom_process_input_func` for the adapter, and edges with windows in a top-level `runtime`. A deploy overlay has flat
engine arguments per stage and sections per platform. What has no meaning in this mesh is collected, for one warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagemesh.config.errors import ConfigError
from stagemesh.config.model import Runtime, Stage
from stagemesh.config.origins import Origins, Path, Tree, show_path

RENAMED = {
    "engine_input_source": "inputs",
    "custom_process_input_func": "input_adapter",
    "prompt_expand_func": "prompt_expand",
    "enable_prefill_only": "is_prefill_only",
    "enable_decode_only": "is_decode_only",
}
MEANINGLESS_STAGE = frozenset(
    {"input_connectors", "output_connectors", "tts_args", "engine_output_type", "engine_input_type"}
)
MEANINGLESS_ENGINE_ARGS = frozenset(
    {"model_stage", "worker_cls", "scheduler_cls", "engine_output_type", "omni_connector_config", "async_chunk"}
)
MEANINGLESS_RUNTIME = frozenset({"enabled", "max_inflight", "connectors", "connector_config"})
_STAGE_KEYS = frozenset(Stage.model_fields)
_RUNTIME_KEYS = frozenset(Runtime.model_fields)


def from_stage_args(tree: Tree, ignored: list[str]) -> Tree:
    """A file of the `stage_args` form as one of ours; others pass unchanged. Raises ConfigError."""
    if "stage_args" not in tree.data:
        return tree
    source = tree.origins[()].source
    written = tree.data["stage_args"]
    if not isinstance(written, list) or not written:
        raise ConfigError("want a list of stages", file=source, path="stage_args", value=written)
    origins = Origins({(): tree.origins[()], ("stages",): tree.origins[("stage_args",)]})
    stages = []
    for index, raw in enumerate(written):
        if not isinstance(raw, Mapping):
            raise ConfigError("want a mapping", file=source, path=f"stage_args[{index}]", value=raw)
        for rest, origin in tree.origins.below(("stage_args", index)):
            moved: Path = (RENAMED.get(str(rest[0]), rest[0]), *rest[1:]) if rest else rest
            origins[("stages", index, *moved)] = origin
        stages.append(_stage(dict(raw), index, ignored))
    data: dict[str, Any] = {"stages": stages}
    for key in ("name", "routing", "limits"):
        if key in tree.data:
            data[key] = tree.data[key]
    known = {"stage_args", "runtime", "name", "routing", "limits"}
    ignored.extend(sorted(key for key in tree.data if key not in known))
    _apply_edges(data, tree, ignored)
    return Tree(data, origins)


def _stage(raw: dict[str, Any], index: int, ignored: list[str]) -> dict[str, Any]:
    stage: dict[str, Any] = {}
    for key, value in raw.items():
        if key in MEANINGLESS_STAGE:
            ignored.append(f"stages[{index}].{key}")
        else:
            stage[RENAMED.get(key, key)] = value
    arguments = dict(stage.get("engine_args") or {})
    stage.setdefault("name", _label(arguments.get("model_stage"), stage.get("stage_id", index)))
    if "model" in arguments:
        stage.setdefault("model", arguments.pop("model"))
    for key in sorted(MEANINGLESS_ENGINE_ARGS & set(arguments)):
        del arguments[key]
        if key != "model_stage":
            ignored.append(f"stages[{index}].engine_args.{key}")
    stage["engine_args"] = arguments
    runtime = dict(stage.get("runtime") or {})
    for key in sorted(MEANINGLESS_RUNTIME & set(runtime)):
        del runtime[key]
        ignored.append(f"stages[{index}].runtime.{key}")
    stage["runtime"] = runtime
    return stage


def _apply_edges(data: dict[str, Any], tree: Tree, ignored: list[str]) -> None:
    runtime = tree.data.get("runtime")
    if runtime is None:
        return
    source = tree.origins[()].source
    if not isinstance(runtime, Mapping):
        raise ConfigError("want a mapping", file=source, path="runtime", value=runtime)
    defaults = runtime.get("defaults") or {}
    ignored.extend(f"runtime.{key}" for key in sorted(runtime) if key not in ("defaults", "edges"))
    ignored.extend(f"runtime.defaults.{key}" for key in sorted(defaults) if key != "window_size")
    edges = runtime.get("edges")
    by_id = {str(stage.get("stage_id", index)): stage for index, stage in enumerate(data["stages"])}
    if edges is None:
        return
    for number, edge in enumerate(edges):
        path = f"runtime.edges[{number}]"
        if not isinstance(edge, Mapping) or not {"from", "to"} <= set(edge):
            raise ConfigError("an edge is {from, to, window_size}", file=source, path=path, value=edge)
        for end in ("from", "to"):
            if str(edge[end]) not in by_id:
                raise ConfigError("no stage has this id", file=source, path=f"{path}.{end}", value=edge[end])
        target = by_id[str(edge["to"])]
        inputs = target.setdefault("inputs", [])
        if edge["from"] not in inputs:
            inputs.append(edge["from"])
        window = edge.get("window_size", defaults.get("window_size", -1))
        if not isinstance(window, int) or isinstance(window, bool) or (window < 1 and window != -1):
            raise ConfigError(
                "want -1 (the whole output) or chunks from 1", file=source, path=f"{path}.window_size", value=window
            )
        target["edge"] = "whole" if window == -1 else "stream"


def from_overlay(tree: Tree, platform: str, ignored: list[str]) -> Tree:
    """A deploy overlay as a tree to merge over a pipeline: the platform's section over the common part.

    Raises:
        ConfigError: a section of the wrong form.
    """
    source = tree.origins[()].source
    origins = Origins({(): tree.origins[()]})
    patches: dict[str, dict[str, Any]] = {}
    numbers: dict[str, int] = {}
    sections: list[tuple[Path, object]] = [(("stages",), tree.data.get("stages") or [])]
    platforms = tree.data.get("platforms") or {}
    if not isinstance(platforms, Mapping):
        raise ConfigError("want a mapping by platform", file=source, path="platforms", value=platforms)
    if platform in platforms:
        section = platforms[platform] or {}
        if not isinstance(section, Mapping):
            raise ConfigError("want a mapping", file=source, path=f"platforms.{platform}", value=section)
        sections.append((("platforms", platform, "stages"), section.get("stages") or []))
        ignored.extend(f"platforms.{platform}.{key}" for key in sorted(section) if key != "stages")
    for path, written in sections:
        if not isinstance(written, list):
            raise ConfigError("want a list of stages", file=source, path=show_path(path), value=written)
        for index, raw in enumerate(written):
            if not isinstance(raw, Mapping) or not ("stage_id" in raw or "name" in raw):
                raise ConfigError(
                    "a stage of an overlay names its stage_id or name", file=source, path=show_path((*path, index))
                )
            key = str(raw.get("stage_id", raw.get("name")))
            number = numbers.setdefault(key, len(numbers))
            patch = patches.setdefault(key, {})
            _flatten_into(patch, raw, ("stages", number), origins, tree.origins, (*path, index))
    data: dict[str, Any] = {"stages": list(patches.values())}
    if tree.data.get("async_chunk"):
        data["async_chunk"] = True
    handled = {"stages", "platforms", "async_chunk", "base_config", "name", "routing", "limits", "connectors"}
    ignored.extend(sorted(key for key in tree.data if key not in handled))
    if tree.data.get("connectors"):
        ignored.append("connectors (stages exchange tensors by reference; name a KV connector as `connector`)")
    for key in ("name", "routing", "limits"):
        if key in tree.data:
            data[key] = tree.data[key]
            origins[(key,)] = tree.origins[(key,)]
    return Tree(data, origins)


def _flatten_into(
    patch: dict[str, Any], raw: Mapping[str, Any], at: Path, origins: Origins, written: Origins, path: Path
) -> None:
    """Sort a stage's flat keys: stage fields, runtime fields, and the rest to the engine."""
    for key, value in raw.items():
        name = RENAMED.get(key, key)
        if name in ("runtime", "engine_args", "default_sampling_params", "adapter_args", "limits", "lora_modules"):
            patch[name] = {**patch.get(name, {}), **(value or {})}
            for inner in value or {}:
                origins[(*at, name, inner)] = written[(*path, key, inner)]
            continue
        if name in _STAGE_KEYS:
            target, place = patch, (*at, name)
        elif name in _RUNTIME_KEYS:
            target, place = patch.setdefault("runtime", {}), (*at, "runtime", name)
        else:
            target, place = patch.setdefault("engine_args", {}), (*at, "engine_args", name)
        target[name] = value
        origins[place] = written[(*path, key)]


def _label(model_stage: object, stage_id: object) -> str:
    text = str(model_stage).lower().replace("_", "-").replace(".", "-") if model_stage else f"stage-{stage_id}"
    return text.strip("-") or f"stage-{stage_id}"

"""Deploy overlays: what differs from one deployment of a pipeline to another, laid over its file.

An overlay has flat engine arguments per stage (`{stage_id: 0, devices: "0", max_num_seqs: 8}`), sections per platform
that win over its common part, and may inherit another by `base_config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stagemesh.config.compat import STREAMS, leave_out_llm_arguments, own_sampling, read_edges
from stagemesh.config.errors import ConfigError, suggest
from stagemesh.config.foreign import (
    MEANINGLESS_ENGINE_ARGS,
    MEANINGLESS_STAGE,
    PIPELINE_WIDE,
    RENAMED,
    left_out,
)
from stagemesh.config.layout import parse_devices
from stagemesh.config.merge import find_stage, patch_stage
from stagemesh.config.model import Runtime, Stage
from stagemesh.config.origins import Origins, Path, Tree, show_path
from stagemesh.config.shape import MAPPINGS

PLATFORMS = ("cuda", "rocm", "npu", "xpu", "cpu")
_OWN_TOP = ("name", "routing", "limits")
_KNOWN_TOP = frozenset({"stages", "platforms", "async_chunk", "base_config", "edges", "connectors", *_OWN_TOP})


def is_overlay(tree: Tree) -> bool:
    """Whether a file is a deploy overlay, rather than a pipeline: it names no model, engine or stage."""
    if "stage_args" in tree.data or "base_config" in tree.data:
        return False
    stages = tree.data.get("stages")
    defines = ("name", "model", "stage_type", "engine", "engine_args")
    return bool({"platforms", "connectors", "async_chunk"} & set(tree.data)) or (
        isinstance(stages, list)
        and bool(stages)
        and all(isinstance(one, dict) and "stage_id" in one and not set(defines) & set(one) for one in stages)
    )


def check_platform(platform: str, overlays: Iterable[Tree]) -> None:
    """Refuse a platform that no overlay has a section for and that is no usual name. Raises ConfigError."""
    named = {name for overlay in overlays for name in _platforms(overlay)}
    known = sorted({*PLATFORMS, *named})
    if platform and platform not in known:
        hint = suggest(platform, known) or f"platforms are {', '.join(known)}"
        raise ConfigError("there is no such platform", file="--platform", value=platform, hint=hint)


def lay_common(tree: Tree, overlay: Tree, ignored: list[str]) -> Tree:
    """The common part of an overlay over a pipeline. Raises ConfigError."""
    for key in overlay.data:
        if key not in _KNOWN_TOP | PIPELINE_WIDE:
            if near := suggest(key, _KNOWN_TOP | PIPELINE_WIDE):
                raise ConfigError("unknown key", file=str(overlay.origins[(key,)]), path=key, hint=near)
            ignored.append(key)
    if overlay.data.get("connectors"):
        ignored.append("connectors (stages exchange tensors by reference; name a KV connector as `connector`)")
    tree = Tree(dict(tree.data), tree.origins.copy())
    for key in _OWN_TOP:
        if overlay.data.get(key) is not None:
            _put_top(tree, key, overlay)
    if overlay.data.get("async_chunk") is not None:
        tree.data[STREAMS] = bool(overlay.data["async_chunk"])
    wide = sorted(PIPELINE_WIDE & set(overlay.data))
    for index, stage in enumerate(_stages(tree)):
        if stage.get("stage_type", "llm") == "llm":
            for key in wide:
                patch_stage(tree, index, {"engine_args": {key: overlay.data[key]}}, _single(overlay, (key,)), ())
    _lay_stages(tree, overlay, ("stages",), ignored)
    for target, (_, mode) in read_edges(overlay, ("edges",), None, -1, ignored).items():
        index = find_stage(_stages(tree), target, source=str(overlay.origins[("edges",)]), path="edges")
        patch_stage(tree, index, {"edge": mode}, _single(overlay, ("edges",)), ())
    return tree


def lay_platform(tree: Tree, overlay: Tree, platform: str, ignored: list[str]) -> Tree:
    """An overlay's section for a platform over a pipeline. Raises ConfigError."""
    section = _platforms(overlay).get(platform) or {}
    ignored.extend(f"platforms.{platform}.{key}" for key in section if key != "stages")
    tree = Tree(dict(tree.data), tree.origins.copy())
    _lay_stages(tree, overlay, ("platforms", platform, "stages"), ignored)
    return tree


def share_listed_devices(tree: Tree, sources: Iterable[str]) -> Tree:
    """Mark stages as sharing whose device lists overlap, where files of these names list them.

    An overlay and a file of the `stage_args` form describe one machine: who lists a device for two stages means it.
    """
    named = set(sources)
    listed: list[set[int]] = []
    tree = Tree(dict(tree.data), tree.origins.copy())
    for index, stage in enumerate(_stages(tree)):
        runtime = stage.get("runtime") or {}
        path = ("stages", index, "runtime", "devices")
        mine: set[int] = set()
        if tree.origins[path].source in named and "shared_devices" not in runtime:
            try:
                devices = runtime.get("devices")
                mine = set(parse_devices(str(devices) if isinstance(devices, int) else devices) or ())
            except ConfigError:
                mine = set()  # validation says it better
            if any(mine & other for other in listed):
                origins = Origins({(): tree.origins[path]})
                patch_stage(tree, index, {"runtime": {"shared_devices": True}}, origins, ())
        listed.append(mine)
    return tree


def _platforms(overlay: Tree) -> dict[str, dict[str, Any] | None]:
    """Sections by platform. Raises ConfigError."""
    platforms = overlay.data.get("platforms") or {}
    source = str(overlay.origins[("platforms",)])
    if not isinstance(platforms, dict):
        raise ConfigError("want a mapping by platform", file=source, path="platforms", value=platforms)
    for name, section in platforms.items():
        if section is not None and not isinstance(section, dict):
            raise ConfigError("want a mapping with `stages`", file=source, path=f"platforms.{name}", value=section)
    return platforms


def _lay_stages(tree: Tree, overlay: Tree, path: Path, ignored: list[str]) -> None:
    written: Any = overlay.data
    for part in path:
        written = (written or {}).get(part)
    if written is None:
        return
    source = str(overlay.origins[path])
    if not isinstance(written, list):
        raise ConfigError("want a list of stages", file=source, path=show_path(path), value=written)
    for number, raw in enumerate(written):
        at = (*path, number)
        where = str(overlay.origins[at])
        if not isinstance(raw, dict) or not ("stage_id" in raw or "name" in raw):
            want = "a stage of an overlay names its stage_id or name"
            raise ConfigError(want, file=where, path=show_path(at), value=raw)
        wanted = raw.get("stage_id", raw.get("name"))
        index = find_stage(_stages(tree), wanted, source=where, path=show_path(at))
        patch, origins = _unflattened(raw, overlay.origins, at, _stages(tree)[index], index, ignored)
        patch.pop("stage_id" if "stage_id" in raw else "name")
        patch_stage(tree, index, patch, origins, ())


def _unflattened(
    raw: Mapping[str, Any], written: Origins, at: Path, stage: Mapping[str, Any], index: int, ignored: list[str]
) -> tuple[dict[str, Any], Origins]:
    """Sort a stage's flat keys: stage fields, runtime fields, and the rest to the engine."""
    patch: dict[str, Any] = {}
    origins = Origins({(): written[at]})
    kind = str(raw.get("stage_type") or stage.get("stage_type") or "llm")

    def put(place: Path, value: Any, path: Path) -> None:
        holder = patch
        for part in place[:-1]:
            holder = holder.setdefault(str(part), {})
        holder[str(place[-1])] = value
        for rest, origin in written.below(path):
            origins[(*place, *rest)] = origin

    for key, value in raw.items():
        name = RENAMED.get(key, key)
        if key in MEANINGLESS_STAGE or key in MEANINGLESS_ENGINE_ARGS:
            reason = MEANINGLESS_STAGE.get(key) or MEANINGLESS_ENGINE_ARGS.get(key, "")
            ignored.append(left_out(f"stages[{index}].{key}", reason))
        elif name in MAPPINGS:
            if value is not None and not isinstance(value, dict):
                where = str(written[(*at, key)])
                raise ConfigError("want a mapping", file=where, path=show_path((*at, key)), value=value)
            for inner, item in (value or {}).items():
                put((name, inner), item, (*at, key, inner))
        elif name in Stage.model_fields:
            put((name,), value, (*at, key))
        elif name in Runtime.model_fields:
            put(("runtime", name), value, (*at, key))
        else:
            put(("engine_args", name), value, (*at, key))
    if kind == "diffusion" and "engine_args" in patch:
        leave_out_llm_arguments(patch["engine_args"], f"stages[{index}]", ignored)
    if "default_sampling_params" in patch:
        patch["default_sampling_params"] = own_sampling(
            patch["default_sampling_params"], kind, f"stages[{index}]", ignored
        )
    return patch, origins


def _put_top(tree: Tree, key: str, overlay: Tree) -> None:
    value, old = overlay.data[key], tree.data.get(key)
    if isinstance(value, dict) and isinstance(old, dict):
        tree.data[key] = {**old, **value}
        for name in value:
            tree.origins.replace_below((key, name), overlay.origins[(key, name)])
    else:
        tree.data[key] = value
        tree.origins.replace_below((key,), overlay.origins[(key,)])


def _single(overlay: Tree, path: Path) -> Origins:
    return Origins({(): overlay.origins[path]})


def _stages(tree: Tree) -> list[dict[str, Any]]:
    stages = tree.data.get("stages")
    return stages if isinstance(stages, list) else []

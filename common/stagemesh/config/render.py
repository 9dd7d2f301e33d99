"""Render: the resolved pipeline as YAML, each value with its origin, and the devices that its replicas get."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from stagemesh.config.layout import devices_per_replica, split_devices
from stagemesh.config.ledger import claim_of, show_ledger
from stagemesh.config.load import Loaded
from stagemesh.config.model import Pipeline
from stagemesh.config.origins import DEFAULT, Origin, Path
from stagemesh.config.preview import preview
from stagemesh.config.read import PipelineDumper

ORIGIN_COLUMN = 64


def render(loaded: Loaded, *, origins: bool = True) -> str:
    """YAML of a loaded pipeline, which loads again as the same one.

    Args:
        origins: add a comment to each line that says where its value came from.
    """
    data = loaded.pipeline.model_dump(mode="json")
    lines = [f"# pipeline {loaded.pipeline.name}, revision {loaded.pipeline.revision}"]
    for path, text in _lines(data, (), 0):
        if origins and path is not None:
            text = f"{text.ljust(ORIGIN_COLUMN)} # {_comment(_origin(loaded, path))}"
        lines.append(text.rstrip())
    return "\n".join(lines) + "\n"


def render_layout(pipeline: Pipeline, devices: Mapping[str, int] | None = None) -> str:
    """Which devices each replica gets, as comments.

    Args:
        devices: ids of a node's devices and their memory in bytes (0: unknown); None: only what the file itself says.
    """
    lines = []
    if devices:
        slots = preview(pipeline, list(devices))
        for slot in slots:
            lines.append(f"{slot.name}: {', '.join(slot.device_ids) or 'no room on this node'}")
        for device, capacity in devices.items():
            claims = [claim_of(slot.stage, slot.replica_id) for slot in slots if device in slot.device_ids]
            if capacity and claims:
                lines += show_ledger(device, capacity, claims)
        return "".join(f"# {line}\n" for line in lines)
    for stage in pipeline.stages:
        needed, replicas = devices_per_replica(stage), stage.runtime.num_replicas
        groups = split_devices(stage.runtime.devices, replicas, needed) if replicas else None
        for replica in range(replicas):
            if groups is not None:
                what = f"devices {','.join(map(str, groups[replica]))}"
            else:
                what = f"{needed} device{'' if needed == 1 else 's'}, chosen by placement"
            shared = ", which other stages may share" if stage.runtime.shared_devices else ""
            lines.append(f"{stage.name}/{replica}: {what}{shared}")
        if not replicas:
            lines.append(f"{stage.name}: no replicas of its own; other nodes bring them")
    return "".join(f"# {line}\n" for line in lines)


def _origin(loaded: Loaded, path: Path) -> Origin:
    """Where a value was written; what is only in the pipeline, and not in the tree it was made from, is a default."""
    value: Any = loaded.tree.data
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return DEFAULT
    return loaded.tree.origins[path]


def _comment(origin: Origin) -> str:
    """An origin in one line, also for a file with an odd name."""
    return "".join(char if char.isprintable() else "?" for char in str(origin))


def _lines(value: Any, path: Path, depth: int) -> Iterator[tuple[Path | None, str]]:
    """Block YAML, a line a scalar, with the path of its value."""
    pad = "  " * depth
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _entry(f"{pad}{_scalar(key, is_key=True)}:", item, (*path, key), depth + 1)
        return
    for index, item in enumerate(value):
        if isinstance(item, dict) and item:
            first = True
            for where, text in _lines(item, (*path, index), depth + 1):
                yield where, f"{pad}- {text[len(pad) + 2 :]}" if first else text
                first = False
        else:
            yield from _entry(f"{pad}-", item, (*path, index), depth + 1)


def _entry(head: str, item: Any, path: Path, depth: int) -> Iterator[tuple[Path | None, str]]:
    is_nested = isinstance(item, list) and any(isinstance(part, dict | list) for part in item)
    if (isinstance(item, dict) and item) or is_nested:
        yield None, head
        yield from _lines(item, path, depth)
    elif isinstance(item, list):
        yield path, f"{head} [{', '.join(_scalar(part, in_list=True) for part in item)}]"
    else:
        yield path, f"{head} {_scalar(item)}"


def _scalar(value: Any, *, is_key: bool = False, in_list: bool = False) -> str:
    """One value on one line, so that the loader reads the same value back."""
    if isinstance(value, str) and not is_key:
        # A text is no interpolation: `${` is written as `\${`, and backslashes before it twice.
        value = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    # Between brackets more texts need quotes.
    written = _dump([value], None)[1:-1] if in_list else _dump(value, None)
    # Quoted where it would take several lines.
    return _dump(value, '"') if isinstance(value, str) and "\n" in written else written


def _dump(value: Any, style: str | None) -> str:
    text: str = yaml.dump(
        value, Dumper=PipelineDumper, default_style=style, default_flow_style=True, width=1 << 30, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")

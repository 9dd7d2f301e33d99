"""Render: the resolved pipeline as YAML, each value with its origin; and as plain data that loads again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from stagemesh.config.layout import devices_per_replica, split_devices
from stagemesh.config.load import Loaded
from stagemesh.config.model import Pipeline
from stagemesh.config.origins import DEFAULT, Origin, Path

ORIGIN_COLUMN = 64
_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./ -]*(?<! )")
"""Texts that need no quotes, unless YAML takes them for something else."""


def render(loaded: Loaded, *, origins: bool = True) -> str:
    """YAML of a loaded pipeline. With `origins`, a comment says where each value came from."""
    data = loaded.pipeline.model_dump(mode="json")
    lines = [f"# pipeline {loaded.pipeline.name}, revision {loaded.pipeline.revision}"]
    for path, text in _lines(data, (), 0):
        if origins and path is not None:
            text = f"{text.ljust(ORIGIN_COLUMN)} # {_origin(loaded, path)}"
        lines.append(text.rstrip())
    return "\n".join(lines) + "\n"


def _origin(loaded: Loaded, path: Path) -> Origin:
    """Where a value was written; what is only in the pipeline, and not in the tree it was made from, is a default."""
    value: Any = loaded.tree.data
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return DEFAULT
    return loaded.tree.origins[path]


def render_layout(pipeline: Pipeline) -> str:
    """Which devices each replica gets, where the file says so; else how many it needs."""
    lines = []
    for stage in pipeline.stages:
        needed = devices_per_replica(stage)
        groups = split_devices(stage.runtime.devices, stage.runtime.num_replicas, needed)
        for replica in range(stage.runtime.num_replicas):
            if groups is None:
                what = f"{needed} device{'' if needed == 1 else 's'}, chosen by placement"
                what += " (may be shared)" if stage.runtime.shared_devices else ""
            else:
                what = "devices " + ",".join(map(str, groups[replica]))
            lines.append(f"# {stage.name}/{replica}: {what}")
    return "\n".join(lines) + "\n"


def _lines(value: Any, path: Path, depth: int) -> Iterator[tuple[Path | None, str]]:
    """Block YAML, a line a scalar, with the path of its value."""
    pad = "  " * depth
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _entry(f"{pad}{_scalar(key)}:", item, (*path, key), depth + 1)
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
    else:
        yield path, f"{head} {_scalar(item)}"


def _scalar(value: Any) -> str:
    """One value on one line, so that YAML reads the same value back."""
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
            return value
        # A resolved value that looks like an interpolation is none any more.
        escaped = value.replace("${", "\\${")
        return yaml.safe_dump(escaped, default_style='"', width=10**6).strip()
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()

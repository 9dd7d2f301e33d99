"""Render: the resolved pipeline as YAML, each value with its origin; and as plain data that loads again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from stagemesh.config.layout import devices_per_replica, split_devices
from stagemesh.config.load import Loaded
from stagemesh.config.origins import Path
from stagemesh.config.model import Pipeline

ORIGIN_COLUMN = 64


def render(loaded: Loaded, *, origins: bool = True) -> str:
    """YAML of a loaded pipeline. With `origins`, a comment says where each value came from."""
    data = loaded.pipeline.model_dump(mode="json")
    lines = [f"# pipeline {loaded.pipeline.name}, revision {loaded.pipeline.revision}"]
    for path, text in _lines(data, (), 0):
        if origins and path is not None:
            text = f"{text.ljust(ORIGIN_COLUMN)} # {loaded.tree.origins[path]}"
        lines.append(text.rstrip())
    return "\n".join(lines) + "\n"


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
    if isinstance(item, dict) and item:
        yield None, head
        yield from _lines(item, path, depth)
    elif isinstance(item, list) and any(isinstance(part, dict | list) for part in item):
        yield None, head
        yield from _lines(item, path, depth)
    else:
        yield path, f"{head} {_scalar(item)}"


def _scalar(value: Any) -> str:
    """One value on one line, so that YAML reads the same value back."""
    if isinstance(value, str):
        plain = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).removesuffix("\n...\n")
        text = plain.strip()
        return text if "\n" not in text and "${" not in text else json.dumps(value)
    # JSON is YAML, but for numbers such as 1e-06, which YAML 1.1 takes for text.
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()

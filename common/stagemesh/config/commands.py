"""What `stagemesh validate`, `render` and `schema` print, as texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from stagemesh.config.errors import ConfigError, suggest
from stagemesh.config.ledger import check_ledger, claim_of
from stagemesh.config.load import Layers, Loaded, load
from stagemesh.config.preview import preview
from stagemesh.config.render import render, render_layout
from stagemesh.config.schema import FORMS

DEVICES = "--devices"
_DEVICE = re.compile(r"(?P<id>[a-z]+:[0-9]+)(?:=(?P<size>[0-9]+(?:\.[0-9]+)?)(?P<unit>[KMGT]i?B))?")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What there is to say about one file."""

    is_good: bool
    text: str
    """One line."""
    warnings: tuple[str, ...] = ()


def validate_file(file: str | Path, devices: Mapping[str, int] | None = None, **layers: Unpack[Layers]) -> Verdict:
    """Check a file, and with `devices` (ids and bytes) also whether one node that has them can run all of it."""
    try:
        loaded = load(file, **layers)
        if devices:
            check_node(loaded, devices)
    except ConfigError as error:
        return Verdict(False, str(error))
    pipeline = loaded.pipeline
    names = ", ".join(stage.name for stage in pipeline.stages)
    text = f"{file}: {pipeline.name} ({names}), revision {pipeline.revision}"
    return Verdict(True, text, loaded.warnings)


def check_node(loaded: Loaded, devices: Mapping[str, int]) -> None:
    """Refuse a pipeline that a node with these devices has no room for.

    Raises:
        ConfigError: a replica without devices, or a device without the memory; the latter with the ledger.
    """
    slots = preview(loaded.pipeline, list(devices))
    for slot in slots:
        if not slot.device_ids:
            index = slot.stage.stage_id
            origin = loaded.tree.origins[("stages", index, "runtime", "num_replicas")]
            where = "" if origin.source == "default" else str(origin)
            path = f"stages[{index}].runtime"
            problem = f"{slot.name} finds no room on a node with {', '.join(devices)}"
            hint = "want more devices, fewer replicas, or shared_devices: true"
            raise ConfigError(problem, file=where, path=path, hint=hint)
    for device, capacity in devices.items():
        check_ledger(
            device, capacity, [claim_of(slot.stage, slot.replica_id) for slot in slots if device in slot.device_ids]
        )


def render_file(
    file: str | Path,
    devices: Mapping[str, int] | None = None,
    *,
    origins: bool = True,
    **layers: Unpack[Layers],
) -> tuple[str, tuple[str, ...]]:
    """The resolved pipeline as YAML, with the devices of its replicas; and the warnings. Raises ConfigError."""
    loaded = load(file, **layers)
    return render(loaded, origins=origins) + render_layout(loaded.pipeline, devices), loaded.warnings


def schema_text(form: str) -> str:
    """The JSON schema of a form of file. Raises ConfigError for a form that there is not."""
    if form not in FORMS:
        hint = suggest(form, FORMS) or f"want one of {', '.join(FORMS)}"
        raise ConfigError("there is no such form", file="FORM", value=form, hint=hint)
    return json.dumps(FORMS[form](), indent=2)


def parse_node(words: Sequence[str]) -> dict[str, int]:
    """Devices of a node: "cuda:0=80GiB,cuda:1" -> ids and bytes (0: unknown). Raises ConfigError."""
    devices: dict[str, int] = {}
    for word in (part.strip() for text in words for part in text.split(",")):
        match = _DEVICE.fullmatch(word)
        if match is None:
            raise ConfigError("want devices such as cuda:0=80GiB,cuda:1=80GiB or cpu:0,cpu:1", file=DEVICES, value=word)
        if match["id"] in devices:
            raise ConfigError("is listed twice", file=DEVICES, value=match["id"])
        devices[match["id"]] = round(float(match["size"]) * _UNITS[match["unit"]]) if match["size"] else 0
    return devices

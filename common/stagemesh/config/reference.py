"""The reference page of pipeline files, from the models and the tables that loading itself uses.

python -m stagemesh.config.reference > docs/reference/pipeline.md
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stagemesh.config import foreign
from stagemesh.config.defaults import CACHE_DEFAULTS
from stagemesh.config.errors import ConfigError
from stagemesh.config.layout import split_devices
from stagemesh.config.overrides import ALWAYS_KEPT, DIFFUSION_ONLY, FILL_ALL, FILL_DIFFUSION
from stagemesh.config.reference_text import (
    DEFAULTS,
    DEVICES,
    FILLED_IN,
    HEAD,
    LAYERS,
    OMNI,
    OVERLAYS,
    SAMPLING,
)
from stagemesh.config.sampling import known_parameters
from stagemesh.config.schema import pipeline_schema

_SECTIONS = (
    ("Pipeline", "The file", ""),
    ("Stage", "A stage", "stages[]"),
    ("Runtime", "Where it runs", "stages[].runtime"),
    ("StageLimits", "Its limits", "stages[].limits"),
    ("Routing", "Load balancing", "routing"),
    ("Limits", "Limits of the pipeline", "limits"),
)
_SPLITS: Sequence[tuple[str, int, int]] = (
    ("3,1", 1, 2), ("1,2,3,4", 2, 2), ("0,1", 4, 2), ("0", 3, 1), ("0,1,2", 2, 2), ("4,5", 4, 2),
)  # fmt: skip


def reference() -> str:
    """The page in Markdown."""
    schema = pipeline_schema()
    models: dict[str, Any] = {**schema["$defs"], "Pipeline": schema}
    parts = [HEAD]
    for model, title, path in _SECTIONS:
        where = f"`{path}`: " if path else ""
        parts.append(f"## {title}\n\n{where}{models[model]['description']}\n\n{_fields(models[model])}")
    parts.append(SAMPLING)
    for kind in ("llm", "diffusion"):
        parts.append(f"* `{kind}`: {', '.join(f'`{name}`' for name in known_parameters(kind))}\n")
    parts += [FILLED_IN, LAYERS.format(**_names()), OVERLAYS, OMNI, _omni(), DEVICES, _splits(), DEFAULTS, _caches()]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def _fields(model: Mapping[str, Any]) -> str:
    rows = []
    for name, field in model["properties"].items():
        default = _default(field) if "default" in field else ""
        rows.append((f"`{name}`", _type(field), default, field.get("description", "")))
    return _table(("key", "type", "default", "meaning"), rows)


def _type(field: Mapping[str, Any]) -> str:
    """A schema's type in words."""
    if "$ref" in field:
        return "mapping"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(one) for one in field["anyOf"] if one.get("type") != "null"))
    kind = field.get("type")
    if isinstance(kind, list):
        return " or ".join(_type({"type": one}) for one in kind if one != "null")
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}s"
    words = {"string": "text", "boolean": "true or false", "object": "mapping", "number": "number"}
    if kind in ("integer", "number"):
        word = "whole number" if kind == "integer" else "number"
        if "minimum" in field:
            return f"{word} from {field['minimum']}"
        return f"{word} above {field['exclusiveMinimum']}" if "exclusiveMinimum" in field else word
    return words.get(str(kind), "anything")


def _default(field: Mapping[str, Any]) -> str:
    default = field["default"]
    if default in (None, "", [], {}) or isinstance(default, dict):
        return ""
    return f"`{str(default).lower()}`" if isinstance(default, bool) else f"`{default}`"


def _names() -> dict[str, str]:
    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    return {
        "kept": listed(sorted(ALWAYS_KEPT)),
        "fill_all": listed(FILL_ALL),
        "fill_diffusion": listed(FILL_DIFFUSION),
        "diffusion_only": listed(sorted(DIFFUSION_ONLY)),
    }


def _omni() -> str:
    renamed = [(f"`{old}`", f"`{new}`") for old, new in foreign.RENAMED.items()]
    parts = [_table(("there", "here"), renamed), "\nWithout a meaning here, and so named in the warning:\n"]
    rows = []
    for place, names in (
        ("stage", foreign.MEANINGLESS_STAGE),
        ("`engine_args`", foreign.MEANINGLESS_ENGINE_ARGS),
        ("`runtime`", foreign.MEANINGLESS_RUNTIME),
        ("`default_sampling_params`", foreign.MEANINGLESS_SAMPLING),
    ):
        rows += [(place, f"`{name}`", reason) for name, reason in names.items()]
    parts.append(_table(("where", "name", "instead"), rows))
    return "\n".join(parts)


def _splits() -> str:
    """The table of device lists, worked out by the code that divides them."""
    rows = []
    for devices, replicas, each in _SPLITS:
        try:
            groups = split_devices(devices, replicas, each)
            result = " · ".join(f"`{','.join(map(str, group))}`" for group in groups or ())
        except ConfigError as error:
            result = f"refused: {error.problem}; {error.hint}"
        rows.append((f'`"{devices}"`', str(replicas), str(each), result))
    return _table(("`devices`", "replicas", "devices each", "groups"), rows)


def _caches() -> str:
    rows = []
    for name, config in CACHE_DEFAULTS.items():
        rows.append((f"`{name}`", ", ".join(f"`{key}: {value}`" for key, value in config.items())))
    return _table(("`cache_backend`", "`cache_config`"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")

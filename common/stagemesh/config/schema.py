"""JSON schemas for editors and other tools: of pipeline files, of deploy overlays, of a stage as workers get it."""

from __future__ import annotations

from typing import Any

from stagemesh.config.model import Pipeline, Stage
from stagemesh.config.overlay import PLATFORMS

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def pipeline_schema() -> dict[str, Any]:
    """Schema of a pipeline file: what loading fills in need not be written."""
    schema = Pipeline.model_json_schema()
    schema["required"] = ["stages"]
    stage, runtime = schema["$defs"]["Stage"], schema["$defs"]["Runtime"]
    stage.pop("required", None)
    _allow_files_spellings(stage["properties"], runtime["properties"])
    return {"$schema": DRAFT, **schema, "title": "A StageMesh pipeline"}


def overlay_schema() -> dict[str, Any]:
    """Schema of a deploy overlay: stages with flat fields, where a name that is not ours is an engine argument."""
    schema = Pipeline.model_json_schema()
    stage, runtime = schema["$defs"]["Stage"]["properties"], schema["$defs"]["Runtime"]["properties"]
    _allow_files_spellings(stage, runtime)
    flat = {**runtime, **stage}
    stages = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": flat,
            "additionalProperties": True,
            "anyOf": [{"required": ["stage_id"]}, {"required": ["name"]}],
        },
    }
    section = {"type": "object", "properties": {"stages": stages}}
    own = {key: schema["properties"][key] for key in ("name", "routing", "limits")}
    return {
        "$schema": DRAFT,
        "title": "A StageMesh deploy overlay",
        "type": "object",
        "$defs": {name: one for name, one in schema["$defs"].items() if name != "Stage"},
        "properties": {
            **own,
            "base_config": {"type": "string", "description": "The file that this one is laid over, relative to it."},
            "async_chunk": {"type": "boolean", "description": "Edges that say nothing are streams, or whole."},
            "stages": stages,
            "platforms": {"type": "object", "properties": dict.fromkeys(PLATFORMS, section)},
        },
    }


def stage_schema() -> dict[str, Any]:
    """Schema of a resolved stage (`Assignment.stage_config_json`)."""
    return {"$schema": DRAFT, **Stage.model_json_schema()}


def _allow_files_spellings(stage: dict[str, Any], runtime: dict[str, Any]) -> None:
    """What a file may write in more ways than the resolved model has."""
    one = {"type": ["string", "integer"]}
    stage["inputs"] |= {"anyOf": [one, {"type": "array", "items": one}]}
    for key in ("type", "items"):
        stage["inputs"].pop(key, None)
    for optional in ("model", "input_adapter"):  # `key:` with nothing behind it is as good as not there
        if stage[optional].get("type") == "string":
            stage[optional]["type"] = ["string", "null"]
    runtime["devices"]["anyOf"].append({"type": "integer"})
    runtime["env"]["additionalProperties"] = {"type": ["string", "number"]}


FORMS = {"pipeline": pipeline_schema, "overlay": overlay_schema, "stage": stage_schema}
"""What `stagemesh schema` prints, by name."""

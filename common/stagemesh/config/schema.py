"""JSON schema of pipeline files, for editors, and of a stage as it travels to workers."""

from __future__ import annotations

from typing import Any

from stagemesh.config.model import Pipeline, Stage

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def pipeline_schema() -> dict[str, Any]:
    """Schema of a pipeline file: what `resolve` fills need not be written."""
    schema = Pipeline.model_json_schema()
    schema["$schema"] = DRAFT
    schema["required"] = ["stages"]
    stage = schema["$defs"]["Stage"]
    stage["required"] = []
    # In a file, inputs are names or ids.
    stage["properties"]["inputs"]["items"] = {"type": ["string", "integer"]}
    schema["properties"]["base_config"] = {
        "type": "string",
        "description": "A file that this one is laid over, relative to it.",
    }
    return schema


def stage_schema() -> dict[str, Any]:
    """Schema of a resolved stage (`Assignment.stage_config_json`)."""
    return {"$schema": DRAFT, **Stage.model_json_schema()}

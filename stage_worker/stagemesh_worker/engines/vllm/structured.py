"""Structured outputs: a typed constraint -> vLLM's."""

from __future__ import annotations

import json
from typing import Any

from vllm.sampling_params import StructuredOutputsParams

from stagemesh.rpc.errors import invalid
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh_worker.engines.vllm.refusal import refused


def structured_outputs(wanted: sampling_pb.StructuredOutputs) -> StructuredOutputsParams:
    """The engine's constraint. Raises MeshError(INVALID_REQUEST) that names the field."""
    kind = wanted.WhichOneof("constraint")
    values: dict[str, Any] = {}
    if kind == "json_schema":
        try:
            values["json"] = json.loads(wanted.json_schema)
        except ValueError as error:
            raise invalid("structured_outputs.json_schema", wanted.json_schema, f"is not JSON: {error}") from error
    elif kind == "choice":
        values["choice"] = list(wanted.choice.choices)
        if not values["choice"]:
            raise invalid("structured_outputs.choice", [], "want at least one choice")
    elif kind == "json_object":
        if not wanted.json_object:
            raise invalid("structured_outputs.json_object", False, "must be true where it is set")
        values["json_object"] = True
    elif kind is not None:
        values[kind] = getattr(wanted, kind)
    else:
        raise invalid("structured_outputs", "(empty)", "want one of json_schema, regex, choice, grammar, json_object")
    try:
        if wanted.disable_any_whitespace and ("json" in values or "json_object" in values):
            values = {"grammar": _compact_grammar(values.get("json", {"type": "object"}))}
        return StructuredOutputsParams(**values)
    except Exception as error:
        raise refused(error, f"structured_outputs.{kind}") from error


def _compact_grammar(schema: Any) -> str:
    """The grammar of a JSON schema without free white space.

    vLLM reads its own flag for this from the engine's configuration only and ignores a request's.
    """
    from xgrammar import Grammar

    compact = Grammar.from_json_schema(json.dumps(schema), any_whitespace=False, separators=(",", ":"))
    return str(compact)

"""Sampling parameters by stage: typed, or plain mappings of the same names."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from google.protobuf import json_format, struct_pb2
from google.protobuf.descriptor import FieldDescriptor

from stagemesh.client.errors import invalid
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Llm:
    """For llm stages; vLLM's names and meanings. What is None takes the stage's default."""

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    """One of json_schema (text or mapping), regex, choice (list), grammar or json_object (True);
    `disable_any_whitespace` beside it."""
    extra: Mapping[str, Any] | None = None
    """Further fields of the engine's sampling parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diffusion:
    """For diffusion stages; diffusers' names and meanings. What is None takes the stage's default."""

    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    height: int | None = None
    """Pixels."""
    width: int | None = None
    """Pixels."""
    seed: int | None = None
    """The same seed gives the same picture on any replica."""
    negative_prompt: str | None = None
    num_images_per_prompt: int | None = None
    output_format: str | None = None
    """png, jpeg, webp or raw."""
    preview_interval_steps: int | None = None
    num_frames: int | None = None
    audio_seconds: float | None = None
    timesteps: Sequence[float] | None = None
    guidance_rescale: float | None = None
    eta: float | None = None
    strength: float | None = None
    extra: Mapping[str, Any] | None = None
    """Further arguments of the pipeline's call."""


Sampling = Llm | Diffusion | Mapping[str, Any] | sampling_pb.SamplingParams
"""Parameters of one stage."""
SamplingByStage = Mapping[str, Sampling] | Sequence[Sampling]
"""By stage name, or in the order of the stages."""

_NAMES: dict[type[Llm] | type[Diffusion], frozenset[str]] = {
    kind: frozenset(field.name for field in fields(kind)) for kind in (Llm, Diffusion)
}


def needs_stage_types(sampling: SamplingByStage | None) -> bool:
    """Whether some entry, such as {"seed": 7}, fits both kinds of stage, so that the pipeline must be asked."""
    entries = sampling.values() if isinstance(sampling, Mapping) else sampling or ()
    return any(isinstance(entry, Mapping) and len(_kinds(entry)) != 1 for entry in entries)


def to_sampling(
    sampling: SamplingByStage | None, stage_type: Callable[[str, int], str | None]
) -> list[inference_pb.StageSampling]:
    """The parameters as messages.

    Args:
        stage_type: kind of stage ("llm", "diffusion", or None when unknown) by name, or by position where the
            name is empty.

    Raises:
        InvalidRequest: naming the field.
    """
    if sampling is None:
        return []
    if isinstance(sampling, Mapping):
        rows = [(stage, position, params) for position, (stage, params) in enumerate(sampling.items())]
    elif isinstance(sampling, Sequence) and not isinstance(sampling, str | bytes):
        rows = [("", position, params) for position, params in enumerate(sampling)]
    else:
        raise invalid("sampling", sampling, 'want {"STAGE": parameters} or a list, one entry a stage')
    return [
        inference_pb.StageSampling(
            stage=stage,
            params=_params(params, f"sampling[{stage or position}]", stage_type(stage, position)),
        )
        for stage, position, params in rows
    ]


def _params(params: Any, path: str, stage_type: str | None) -> sampling_pb.SamplingParams:
    if isinstance(params, sampling_pb.SamplingParams):
        return params
    if isinstance(params, Mapping):
        params = _typed(params, path, stage_type)
    if isinstance(params, Llm):
        return sampling_pb.SamplingParams(llm=_fill(sampling_pb.LlmSamplingParams(), params, path))
    if isinstance(params, Diffusion):
        return sampling_pb.SamplingParams(diffusion=_fill(sampling_pb.DiffusionSamplingParams(), params, path))
    raise invalid(path, params, "want stagemesh.Llm(...), stagemesh.Diffusion(...) or a mapping")


def _kinds(params: Mapping[str, Any]) -> list[type[Llm] | type[Diffusion]]:
    return [kind for kind, names in _NAMES.items() if names.issuperset(params)]


def _typed(params: Mapping[str, Any], path: str, stage_type: str | None) -> Llm | Diffusion:
    kinds = _kinds(params)
    if len(kinds) == 1:
        return kinds[0](**params)
    if kinds:  # it fits both
        return (Diffusion if stage_type == "diffusion" else Llm)(**params)  # a plug-in's stage takes those of an LLM
    wanted = {"llm": Llm, "diffusion": Diffusion}.get(stage_type or "")
    known = _NAMES[wanted] if wanted else frozenset[str]().union(*_NAMES.values())
    unknown = next((name for name in params if name not in known), None)
    if unknown is None:
        raise invalid(path, dict(params), "mixes parameters of llm stages with those of diffusion stages")
    near = difflib.get_close_matches(str(unknown), known, 1)
    hint = f"did you mean {near[0]}?" if near else "what only the engine knows goes into `extra`"
    raise invalid(f"{path}.{unknown}", params[unknown], f"unknown parameter; {hint}")


def _fill(message: Any, params: Llm | Diffusion, path: str) -> Any:
    for field in fields(params):
        value = getattr(params, field.name)
        if value is None:
            continue
        try:
            if field.name == "extra":
                message.extra.CopyFrom(json_format.ParseDict(dict(value), struct_pb2.Struct()))
            elif field.name == "structured_outputs":
                message.structured_outputs.CopyFrom(_structured(value, f"{path}.structured_outputs"))
            elif isinstance(value, Mapping):
                getattr(message, field.name).update({int(key): number for key, number in value.items()})
            elif isinstance(value, Sequence) and not isinstance(value, str):
                getattr(message, field.name).extend(value)
            else:
                setattr(message, field.name, value)
        except (TypeError, ValueError, AttributeError, json_format.ParseError) as error:
            # What the wire cannot carry at all; values that it can carry are the head's to judge.
            raise invalid(f"{path}.{field.name}", value, f"want {_wanted(message, field.name)}") from error
    return message


def _wanted(message: Any, name: str) -> str:
    field = message.DESCRIPTOR.fields_by_name[name]
    kind = _WANTED.get(field.type, "a mapping")
    is_list = isinstance(getattr(message, name), Sequence) and not isinstance(getattr(message, name), str)
    return f"a list, each {kind}" if is_list else kind


_WANTED = {
    FieldDescriptor.TYPE_UINT32: "a whole number of at least 0",
    FieldDescriptor.TYPE_INT32: "a whole number",
    FieldDescriptor.TYPE_INT64: "a whole number",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_STRING: "a text",
}


def _structured(value: Any, path: str) -> sampling_pb.StructuredOutputs:
    if not isinstance(value, Mapping):
        raise TypeError(value)
    forms = ("json_schema", "regex", "choice", "grammar", "json_object")
    given = [name for name in value if name != "disable_any_whitespace"]
    if len(given) != 1 or given[0] not in forms:
        raise invalid(path, dict(value), f"want exactly one of {', '.join(forms)}")
    message = sampling_pb.StructuredOutputs()
    name, constraint = given[0], value[given[0]]
    if name == "choice":
        message.choice.choices.extend(constraint)
    elif name == "json_schema" and not isinstance(constraint, str):
        message.json_schema = json.dumps(constraint)
    else:
        setattr(message, name, constraint)
    if "disable_any_whitespace" in value:
        message.disable_any_whitespace = value["disable_any_whitespace"]
    return message

"""Sampling parameters of a request: matched to stages, laid over the stages' defaults, checked field by field."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from stagemesh.config import Pipeline, Stage
from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb

MAX_STOP_TEXTS = 64
SEED_BITS = 32


def kind_of(stage: Stage) -> str:
    """Which member of `SamplingParams` a stage takes: "llm" or "diffusion"."""
    return "diffusion" if stage.stage_type == "diffusion" else "llm"


def defaults_of(stage: Stage) -> sampling_pb.SamplingParams:
    """A stage's `default_sampling_params` as a message.

    Raises:
        ValueError: a field that there is not, or a value of the wrong type.
    """
    return from_mapping(stage, stage.default_sampling_params, f"stage {stage.name!r}: default_sampling_params")


def from_mapping(stage: Stage, values: Mapping[str, Any], path: str) -> sampling_pb.SamplingParams:
    """Parameters that an operator wrote as a mapping, as a message.

    Raises:
        ValueError: a field that there is not, or a value of the wrong type; it names `path`.
    """
    params = sampling_pb.SamplingParams()
    target: Message = getattr(params, kind_of(stage))
    target.SetInParent()
    given = {name: value for name, value in values.items() if value is not None}
    try:
        json_format.ParseDict(_as_json(given, target), target)
    except json_format.ParseError as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        _check(target, path)
    except MeshError as error:
        raise ValueError(error.message) from None
    return params


def _as_json(values: Mapping[str, Any], target: Message) -> dict[str, Any]:
    """Accept a pipeline file's spellings: `stop: "x"` for a list of one, vLLM's form of structured outputs."""
    known = target.DESCRIPTOR.fields_by_name
    result: dict[str, Any] = {}
    extra: dict[str, Any] = dict(values.get("extra") or {})
    for name, value in values.items():
        if name == "extra":
            continue
        if name not in known:
            extra[name] = value  # the engine checks what it is
        elif name == "structured_outputs" and isinstance(value, Mapping):
            result[name] = _structured(value)
        elif known[name].is_repeated and isinstance(value, str | int):
            result[name] = [value]
        else:
            result[name] = list(value) if isinstance(value, tuple) else value
    if extra:
        result["extra"] = extra
    return result


def _structured(value: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(value)
    if "json" in result:
        schema = result.pop("json")
        result["json_schema"] = schema if isinstance(schema, str) else json.dumps(schema)
    if isinstance(result.get("choice"), list | tuple):
        result["choice"] = {"choices": list(result["choice"])}
    return result


def match(
    pipeline: Pipeline, given: Sequence[inference_pb.StageSampling]
) -> dict[str, tuple[str, sampling_pb.SamplingParams]]:
    """Stage name -> (field path, parameters) of what a request gives, by name or by position.

    The two stages of a prefill/decode pair run with one set, the decode stage's: by position the pair may have one set
    or two, of which the prefill stage's is not used.

    Raises:
        MeshError: INVALID_REQUEST, a stage that there is not, one named twice, or a count that does not fit.
    """
    names = [stage.name for stage in pipeline.stages]
    prefills = [stage.name for stage in pipeline.stages if stage.is_prefill_only]
    if prefills and len(given) == len(names) - 1 and not any(entry.stage for entry in given):
        names.remove(prefills[0])
    if given and not any(entry.stage for entry in given) and len(given) != len(names):
        raise invalid(
            "sampling",
            len(given),
            f"sets without stage names go in order, one for each of the {len(names)} stages ({', '.join(names)})",
        )
    result: dict[str, tuple[str, sampling_pb.SamplingParams]] = {}
    for position, entry in enumerate(given):
        if entry.stage:
            name = entry.stage
            if name not in names:
                raise invalid(f"sampling[{position}].stage", name, f"no such stage; stages are {', '.join(names)}")
            if name in prefills:
                decode = pipeline.consumers(pipeline.stage(name))[0].name
                problem = f"a prefill stage runs with its decode stage's parameters: give them to {decode!r}"
                raise invalid(f"sampling[{position}].stage", name, problem)
        elif position < len(names):
            name = names[position]
        else:
            raise invalid("sampling", len(given), f"the pipeline has only {len(names)} stages")
        if name in result:
            raise invalid(f"sampling[{position}].stage", name, "has parameters already: give one set a stage")
        result[name] = (f"sampling[{name}]", entry.params)
    return result


def merge(
    stage: Stage, defaults: sampling_pb.SamplingParams, given: tuple[str, sampling_pb.SamplingParams] | None
) -> sampling_pb.SamplingParams:
    """The stage's defaults with the request's fields over them; a list given replaces the default list.

    Raises:
        MeshError: INVALID_REQUEST that names the field.
    """
    merged = sampling_pb.SamplingParams()
    merged.CopyFrom(defaults)
    if given is None:
        return merged
    path, params = given
    kind = params.WhichOneof("params")
    if kind is None:
        return merged
    wanted = kind_of(stage)
    if kind != wanted:
        raise MeshError(
            Reason.INVALID_REQUEST,
            f"{path}.{kind}: stage {stage.name!r} is of type {stage.stage_type} and takes `{wanted}` parameters",
            field=f"{path}.{kind}",
        )
    source, target = getattr(params, kind), getattr(merged, kind)
    _check(source, path)
    for field, _ in source.ListFields():
        if field.name != "extra":
            target.ClearField(field.name)
    target.MergeFrom(source)
    return merged


def fix_seed(params: sampling_pb.SamplingParams) -> None:
    """Give diffusion parameters a seed, so that a repeated attempt on another replica draws the same picture."""
    if params.WhichOneof("params") == "diffusion" and not params.diffusion.HasField("seed"):
        params.diffusion.seed = random.getrandbits(SEED_BITS)


# -- the rules -------------------------------------------------------------
Rule = tuple[Callable[[Any], bool], str]


def _between(low: float, high: float) -> Rule:
    return lambda value: low <= value <= high, f"must be from {low:g} to {high:g}"


def _at_least(low: float) -> Rule:
    return lambda value: low <= value < math.inf, f"must be >= {low:g}"


_RULES: dict[str, dict[str, Rule]] = {
    "LlmSamplingParams": {
        "n": _between(1, 128),
        "max_tokens": _at_least(1),
        "temperature": _at_least(0),
        "top_p": (lambda value: 0 < value <= 1, "must be above 0 and at most 1"),
        "top_k": (lambda value: value >= -1, "must be >= 1, or 0 or -1 for all"),
        "min_p": _between(0, 1),
        "presence_penalty": _between(-2, 2),
        "frequency_penalty": _between(-2, 2),
        "repetition_penalty": (lambda value: 0 < value < math.inf, "must be above 0"),
        "stop": (lambda value: len(value) <= MAX_STOP_TEXTS and all(value), f"1 to {MAX_STOP_TEXTS} texts, none empty"),
        "truncate_prompt_tokens": (
            lambda value: value == -1 or value >= 1,
            "must be >= 1, or -1",
        ),
        "logit_bias": (
            lambda value: all(math.isfinite(bias) for bias in value.values()),
            "every bias must be a finite number",
        ),
    },
    "DiffusionSamplingParams": {
        "num_inference_steps": _between(1, 10_000),
        "guidance_scale": _at_least(0),
        "height": _between(1, 65_536),
        "width": _between(1, 65_536),
        "num_images_per_prompt": _between(1, 128),
        "output_format": (lambda value: value in {"png", "jpeg", "webp", "raw"}, "must be png, jpeg, webp or raw"),
        "num_frames": _between(1, 100_000),
        "audio_seconds": (lambda value: 0 < value <= 86_400, "must be above 0 and at most 86400"),
        "guidance_rescale": _between(0, 1),
        "eta": _between(0, 1),
        "strength": _between(0, 1),
    },
}
"""Message -> field -> what is right. NaN fails every comparison, and so every rule."""


def _check(params: Message, path: str) -> None:
    rules = _RULES[params.DESCRIPTOR.name]
    for field, value in params.ListFields():
        rule = rules.get(field.name)
        if rule is not None and not rule[0](value):
            raise invalid(f"{path}.{field.name}", _plain(value), rule[1])
    if isinstance(params, sampling_pb.LlmSamplingParams):
        _check_llm(params, path)


def _check_llm(params: sampling_pb.LlmSamplingParams, path: str) -> None:
    if params.HasField("min_tokens") and params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        raise invalid(f"{path}.min_tokens", params.min_tokens, f"must be at most max_tokens, {params.max_tokens}")
    if params.HasField("structured_outputs"):
        structured = params.structured_outputs
        constraint = structured.WhichOneof("constraint")
        if constraint is None:
            raise invalid(f"{path}.structured_outputs", "", "set json_schema, regex, choice, grammar or json_object")
        if constraint == "choice" and not structured.choice.choices:
            raise invalid(f"{path}.structured_outputs.choice", [], "give at least one text")
        if constraint == "json_object" and not structured.json_object:
            raise invalid(f"{path}.structured_outputs.json_object", False, "must be true, or leave it out")
        if constraint == "json_schema":
            try:
                json.loads(structured.json_schema)
            except ValueError as error:
                raise MeshError(
                    Reason.INVALID_REQUEST,
                    f"{path}.structured_outputs.json_schema: is not JSON: {error}",
                    field=f"{path}.structured_outputs.json_schema",
                ) from None


def _plain(value: Any) -> Any:
    """A value as people write it: float32 -0.1 is not -0.10000000149."""
    return float(f"{value:.7g}") if isinstance(value, float) else value

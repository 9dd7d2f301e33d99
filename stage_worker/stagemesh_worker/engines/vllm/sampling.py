"""Typed sampling parameters -> vLLM's SamplingParams."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from vllm.sampling_params import RequestOutputKind, SamplingParams

from stagemesh.config import Stage, suggest
from stagemesh.rpc.errors import invalid
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.wire import whole_numbers
from stagemesh_worker.engines.base import EngineConfigError
from stagemesh_worker.engines.vllm.hand_off import KV_TRANSFER
from stagemesh_worker.engines.vllm.refusal import refused
from stagemesh_worker.engines.vllm.structured import structured_outputs

_SCALARS = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "ignore_eos", "logprobs", "prompt_logprobs",
    "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
)  # fmt: skip
_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")
_TYPED = frozenset({*_SCALARS, *_LISTS, "stop", "logit_bias", "structured_outputs"})
_INTERNAL = frozenset({"detokenize", "output_kind", "output_text_buffer_length", "skip_clone", "stream_interval"})
EXTRA_FIELDS = sorted(
    name for name in SamplingParams.__struct_fields__ if not name.startswith("_") and name not in _TYPED | _INTERNAL
)
"""Fields of vLLM's parameters that travel in `extra`."""
_OURS = frozenset({"truncate_prompt_tokens", "extra"})


def check_defaults(stage: Stage) -> None:
    """Check a stage's `default_sampling_params` against what can be set. Raises EngineConfigError."""
    known = [*_TYPED, *EXTRA_FIELDS, *_OURS]
    for name in stage.default_sampling_params:
        if name not in known:
            hint = suggest(name, known) or f"vLLM's are {', '.join(sorted(known))}"
            raise EngineConfigError(f"default_sampling_params.{name}: vLLM has no such parameter; {hint}")


def sampling_params(params: sampling_pb.LlmSamplingParams, task: stage_pb.SubmitTask) -> SamplingParams:
    """The engine's parameters of a task, its budget less the tokens that it resumes from.

    Text is made here and not by the engine, so that it is right across a resume: `detokenize` is off, and stop texts
    are ours to find.

    Raises:
        MeshError: INVALID_REQUEST that names the field.
    """
    values: dict[str, Any] = {"max_tokens": None}
    values |= {name: getattr(params, name) for name in _SCALARS if params.HasField(name)}  # type: ignore[arg-type]
    values |= {name: list(getattr(params, name)) for name in _LISTS if getattr(params, name)}
    if params.logit_bias:
        values["logit_bias"] = dict(params.logit_bias)
    if params.HasField("structured_outputs"):
        values["structured_outputs"] = structured_outputs(params.structured_outputs)
    values |= _extra(params)
    done = len(task.resume_token_ids)
    if done:
        if values["max_tokens"] is not None:
            values["max_tokens"] = max(1, values["max_tokens"] - done)
        values["min_tokens"] = max(0, values.get("min_tokens", 0) - done)
    if task.HasField("kv_transfer_params"):
        transfer = whole_numbers(json_format.MessageToDict(task.kv_transfer_params))
        values["extra_args"] = {**(values.get("extra_args") or {}), KV_TRANSFER: transfer}
    try:
        return SamplingParams(**values, detokenize=False, output_kind=RequestOutputKind.DELTA, skip_clone=True)
    except Exception as error:
        raise refused(error) from error


def _extra(params: sampling_pb.LlmSamplingParams) -> dict[str, Any]:
    extra: dict[str, Any] = whole_numbers(json_format.MessageToDict(params.extra))
    for name in extra:
        if name not in EXTRA_FIELDS:
            hint = suggest(name, EXTRA_FIELDS) or f"want one of {', '.join(EXTRA_FIELDS)}"
            raise invalid(f"extra.{name}", extra[name], f"vLLM has no such sampling parameter; {hint}")
    return extra

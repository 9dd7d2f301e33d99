"""The arguments of `generate()`, as the wire has them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TypedDict

from stagemesh.client.errors import InvalidRequest, invalid
from stagemesh.client.prompts import MediaInput, PromptLike, to_prompt
from stagemesh.client.tracing import given_headers
from stagemesh.names import REQUEST_ID, REQUEST_ID_WORDS
from stagemesh.rpc.errors import Reason
from stagemesh.rpc.options import MAX_MESSAGE_BYTES
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh.wire import MODALITIES

_MODES = {"delta": inference_pb.OUTPUT_MODE_DELTA, "final": inference_pb.OUTPUT_MODE_FINAL_ONLY}
_RECOVERY = {
    "best_effort": inference_pb.RECOVERY_POLICY_BEST_EFFORT,
    "exact_or_fail": inference_pb.RECOVERY_POLICY_EXACT_OR_FAIL,
}


class RequestOptions(TypedDict, total=False):
    """What a request may say beside prompt and sampling parameters."""

    pipeline: str
    """Its name; empty when the head serves just one."""
    outputs: str | Sequence[str] | None
    """Modalities wanted (text, image, audio, video, latent), or stage names; None: all that the pipeline delivers."""
    negative: str
    """What a diffusion stage must avoid."""
    media: Sequence[MediaInput]
    """Pictures, sounds and videos that go with the prompt."""
    mode: str
    """delta: outputs as they grow (the default); final: once, when the stage is done."""
    request_id: str | None
    """Made here unless given, since a broken stream is taken up by it."""
    priority: int
    """Larger is later, 0 is normal."""
    session_id: str
    """Requests of one session go to one replica where the policy can."""
    recovery: str
    """What may happen after a loss of delivered output: best_effort (the default) or exact_or_fail."""
    lora: str
    """Adapter, by its name in the pipeline file."""
    lora_scale: float | None
    """Weight of the adapter; None is 1."""
    cache_salt: str
    """Separates prefix caches of tenants."""
    data_parallel_rank: int | None
    """Rank inside the replica, for engines that have several."""
    reasoning_ended: bool | None
    """The reasoning part of the output is over, for structured outputs."""
    trace_headers: Mapping[str, str] | None
    """W3C `traceparent` and `tracestate` of the caller's span. Not needed in a program that uses OpenTelemetry."""
    references: bool
    """Leave large outputs with their replicas: they come as a `Reference`, which `fetch` brings. Else they are fetched
    as they come."""


def build_request(
    prompt: PromptLike,
    *,
    pipeline: str = "",
    negative: str = "",
    media: Sequence[MediaInput] = (),
    outputs: str | Sequence[str] | None = None,
    mode: str = "delta",
    priority: int = 0,
    session_id: str = "",
    recovery: str = "best_effort",
    lora: str = "",
    lora_scale: float | None = None,
    cache_salt: str = "",
    request_id: str | None = None,
    references: bool = False,
    data_parallel_rank: int | None = None,
    reasoning_ended: bool | None = None,
    trace_headers: Mapping[str, str] | None = None,
) -> inference_pb.GenerateRequest:
    """A request without its sampling parameters; `RequestOptions` explains the rest.

    `references` is the client's own; `trace_headers` are checked here, and travel as the call's metadata.

    Raises:
        InvalidRequest: naming the argument.
    """
    if mode not in _MODES:
        raise invalid("mode", mode, f"want one of {', '.join(_MODES)}")
    if recovery not in _RECOVERY:
        raise invalid("recovery", recovery, f"want one of {', '.join(_RECOVERY)}")
    given_headers(trace_headers)
    if request_id is None:
        request_id = f"req-{uuid.uuid4().hex}"
    elif not REQUEST_ID.fullmatch(request_id):
        raise invalid("request_id", request_id, f"want {REQUEST_ID_WORDS}")
    names = [outputs] if isinstance(outputs, str) else list(outputs or ())
    request = inference_pb.GenerateRequest(
        request_id=request_id,
        pipeline=pipeline,
        prompt=to_prompt(prompt, negative=negative, media=media),
        output_modalities=[MODALITIES[name] for name in names if name in MODALITIES],
        output_stages=[name for name in names if name not in MODALITIES],
        output_mode=_MODES[mode],
        priority=priority,
        session_id=session_id,
        recovery_policy=_RECOVERY[recovery],
        cache_salt=cache_salt,
        reasoning_ended=reasoning_ended,
    )
    if data_parallel_rank is not None:
        if not 0 <= data_parallel_rank < 1 << 32:
            raise invalid("data_parallel_rank", data_parallel_rank, "want a whole number of at least 0")
        request.data_parallel_rank = data_parallel_rank
    if lora:
        request.lora.CopyFrom(sampling_pb.LoraRequest(name=lora, scale=lora_scale))
    if (size := request.ByteSize()) > MAX_MESSAGE_BYTES:
        # gRPC would refuse it too, in words that sound like an overload.
        raise InvalidRequest(
            Reason.PROMPT_TOO_LARGE,
            f"prompt: {size} bytes with its media: a message is at most {MAX_MESSAGE_BYTES}",
            field="prompt",
            limit_bytes=MAX_MESSAGE_BYTES,
        )
    return request

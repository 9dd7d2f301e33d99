"""From the messages of the wire to typed frames."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from google.protobuf import json_format

from stagemesh.client.errors import InternalError, Unsupported
from stagemesh.client.frames import (
    Audio,
    AudioChunk,
    Finished,
    Frame,
    Image,
    Media,
    Progress,
    StageFinished,
    TensorFrame,
    TextDelta,
    Timings,
    TopLogprobs,
    Usage,
    Video,
)
from stagemesh.rpc.errors import Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh.wire import enum_word

_NOT_NUMPY = {"bfloat16": "uint16"}


def decode(response: inference_pb.GenerateResponse | inference_pb.GenerateInteractiveResponse) -> Frame:
    """The frame of one response."""
    common: dict[str, Any] = {"request_id": response.request_id, "sequence": response.sequence}
    if response.WhichOneof("event") == "finished":
        finished = response.finished
        return Finished(
            **common,
            finish_reason=enum_word(frame_pb.FinishReason, finished.finish_reason),
            usage=_usage(finished.usage),
            total_s=finished.total.ToNanoseconds() / 1e9,
            stages=MappingProxyType(
                {row.stage: _stage_finished(row.finished, {**common, "stage": row.stage}) for row in finished.stages}
            ),
        )
    frame = response.frame
    common |= {"stage": frame.stage, "replica_id": frame.replica_id}
    match frame.WhichOneof("content"):
        case "text":
            return _text(frame.text, common)
        case "progress":
            preview = _media(frame.progress.preview, common) if frame.progress.HasField("preview") else None
            return Progress(**common, step=frame.progress.step, total_steps=frame.progress.total_steps, preview=preview)
        case "media":
            return _media(frame.media, common)
        case "audio_chunk":
            chunk = frame.audio_chunk
            return AudioChunk(
                **common,
                samples=_array(chunk.samples),
                sample_rate_hz=chunk.sample_rate_hz,
                offset_samples=chunk.offset_samples,
                last=chunk.last,
            )
        case "tensor":
            value = frame.tensor.value
            return TensorFrame(
                **common, name=frame.tensor.name, dtype=value.inline.dtype or value.ref.dtype, array=_array(value)
            )
        case "stage_finished":
            return _stage_finished(frame.stage_finished, common)
    raise InternalError(
        Reason.INTERNAL, f"the head sent a frame of a kind that this client does not know (stage {frame.stage!r})"
    )


def _text(delta: frame_pb.TextDelta, common: Mapping[str, Any]) -> TextDelta:
    return TextDelta(
        **common,
        text=delta.text,
        token_ids=tuple(delta.token_ids),
        index=delta.index,
        logprobs=tuple(delta.logprobs),
        top_logprobs=tuple(
            TopLogprobs(token_ids=tuple(top.token_ids), logprobs=tuple(top.logprobs)) for top in delta.top_logprobs
        ),
    )


def _media(media: frame_pb.MediaOutput, common: Mapping[str, Any]) -> Media:
    if media.HasField("ref"):
        raise _by_reference(media.ref)
    fields: dict[str, Any] = {
        **common,
        "mime_type": media.mime_type,
        "data": media.data,
        "index": media.index,
        "seed": media.seed if media.HasField("seed") else None,
    }
    match media.modality:
        case frame_pb.MODALITY_IMAGE:
            return Image(**fields, width=media.width, height=media.height)
        case frame_pb.MODALITY_AUDIO:
            return Audio(**fields, sample_rate_hz=media.sample_rate_hz)
        case frame_pb.MODALITY_VIDEO:
            return Video(**fields, width=media.width, height=media.height)
    return Media(**fields)


def _array(value: tensor_pb.TensorValue) -> np.ndarray:
    """A read-only view of the tensor's bytes."""
    if value.WhichOneof("value") == "ref":
        raise _by_reference(value.ref)
    dtype = np.dtype(_NOT_NUMPY.get(value.inline.dtype, value.inline.dtype)).newbyteorder("<")
    return np.frombuffer(value.inline.data, dtype).reshape(tuple(value.inline.shape))


def _by_reference(ref: tensor_pb.TensorRef) -> Unsupported:
    return Unsupported(
        Reason.UNSUPPORTED,
        f"an output of {ref.size_bytes} bytes stayed with its replica at {ref.endpoint}: too large for a response",
        endpoint=ref.endpoint,
        size_bytes=ref.size_bytes,
    )


def _stage_finished(finished: frame_pb.StageFinished, common: Mapping[str, Any]) -> StageFinished:
    timings = finished.timings
    return StageFinished(
        **common,
        finish_reason=enum_word(frame_pb.FinishReason, finished.finish_reason),
        stop_reason=finished.stop_reason,
        usage=_usage(finished.usage),
        timings=Timings(
            queue_s=timings.queue.ToNanoseconds() / 1e9,
            engine_queue_s=timings.engine_queue.ToNanoseconds() / 1e9,
            first_output_s=timings.first_output.ToNanoseconds() / 1e9,
            total_s=timings.total.ToNanoseconds() / 1e9,
            transfer_s=timings.transfer.ToNanoseconds() / 1e9,
        ),
        replicas=tuple(replica.replica_id for replica in finished.replicas),
        recovery=finished.recovery,
        extra=MappingProxyType(json_format.MessageToDict(finished.extra)),
    )


def _usage(usage: frame_pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        diffusion_steps=usage.diffusion_steps,
        images=usage.images,
        audio_seconds=usage.audio_seconds,
    )

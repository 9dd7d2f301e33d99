"""From the messages of the wire to typed frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from google.protobuf import json_format

from stagemesh.client.errors import InternalError
from stagemesh.client.frames import (
    Audio,
    AudioChunk,
    Finished,
    Frame,
    Image,
    Media,
    Progress,
    Reference,
    StageFinished,
    TensorFrame,
    TextDelta,
    Timings,
    TopLogprobs,
    Transfer,
    Usage,
    Video,
)
from stagemesh.references import reference_in
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
        ends = {
            (row.stage, row.companion): _stage_finished(row.finished, {**common, "stage": row.stage})
            for row in finished.stages
        }
        return Finished(
            **common,
            finish_reason=enum_word(frame_pb.FinishReason, finished.finish_reason),
            usage=_usage(finished.usage),
            total_s=finished.total.ToNanoseconds() / 1e9,
            stages=MappingProxyType({stage: end for (stage, suffix), end in ends.items() if not suffix}),
            companions=MappingProxyType({suffix: end for (_, suffix), end in ends.items() if suffix}),
        )
    frame = response.frame
    common |= {"stage": frame.stage, "replica_id": frame.replica_id}
    if (ref := reference_in(frame)) is not None:
        return _reference(frame, ref, common)
    match frame.WhichOneof("content"):
        case "text":
            return _text(frame.text, common)
        case "progress":
            has_preview = frame.progress.HasField("preview") and not frame.progress.preview.HasField("ref")
            preview = _media(frame.progress.preview, common) if has_preview else None
            return Progress(**common, step=frame.progress.step, total_steps=frame.progress.total_steps, preview=preview)
        case "media":
            return _media(frame.media, common)
        case "audio_chunk":
            chunk = frame.audio_chunk
            return AudioChunk(
                **common,
                samples=_array(chunk.samples.inline),
                sample_rate_hz=chunk.sample_rate_hz,
                offset_samples=chunk.offset_samples,
                last=chunk.last,
            )
        case "tensor":
            inline = frame.tensor.value.inline
            return TensorFrame(**common, name=frame.tensor.name, dtype=inline.dtype, array=_array(inline))
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


def _media(media: frame_pb.MediaOutput, common: Mapping[str, Any], data: bytes | None = None) -> Media:
    """A file; `data` are its bytes when they are not in the message."""
    fields: dict[str, Any] = {
        **common,
        "mime_type": media.mime_type,
        "data": media.data if data is None else data,
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


def _array(tensor: tensor_pb.Tensor) -> np.ndarray:
    """A read-only view of an inline tensor's bytes."""
    return _view(tensor.data, tensor.dtype, tensor.shape)


def _view(data: Any, dtype: str, shape: Sequence[int]) -> np.ndarray:
    array = np.frombuffer(data, np.dtype(_NOT_NUMPY.get(dtype, dtype)).newbyteorder("<")).reshape(tuple(shape))
    array.flags.writeable = False
    return array


def _reference(frame: frame_pb.Frame, ref: tensor_pb.TensorRef, common: Mapping[str, Any]) -> Reference:
    kind = frame.WhichOneof("content") or ""
    return Reference(
        **common,
        kind=enum_word(frame_pb.Modality, frame.media.modality) if kind == "media" else kind,
        name=frame.tensor.name,
        index=frame.media.index,
        dtype=ref.dtype,
        shape=tuple(ref.shape),
        size_bytes=ref.size_bytes,
        message=frame,
    )


def complete(reference: Reference, data: np.ndarray) -> Frame:
    """The frame that a reference stands for, from its bytes (uint8)."""
    frame = reference.message
    common = {name: getattr(reference, name) for name in ("request_id", "sequence", "stage", "replica_id")}
    if frame.HasField("media"):
        return _media(frame.media, common, data.tobytes())
    array = _view(data, reference.dtype, reference.shape)
    if frame.HasField("tensor"):
        return TensorFrame(**common, name=reference.name, dtype=reference.dtype, array=array)
    chunk = frame.audio_chunk
    return AudioChunk(
        **common,
        samples=array,
        sample_rate_hz=chunk.sample_rate_hz,
        offset_samples=chunk.offset_samples,
        last=chunk.last,
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
        transfers=tuple(
            Transfer(
                source=moved.source,
                size_bytes=moved.size_bytes,
                duration_s=moved.duration.ToNanoseconds() / 1e9,
            )
            for moved in finished.transfers
        ),
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

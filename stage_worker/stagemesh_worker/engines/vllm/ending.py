"""How a vLLM completion ended, in the mesh's words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb

_REASONS = {
    "stop": frame_pb.FINISH_REASON_STOP,
    "repetition": frame_pb.FINISH_REASON_STOP,
    "length": frame_pb.FINISH_REASON_LENGTH,
    "abort": frame_pb.FINISH_REASON_ABORT,
}


def finish_reason(completion: Any) -> frame_pb.FinishReason.ValueType:
    """The reason of a finished `CompletionOutput`. Raises MeshError when the engine failed on it."""
    reason = _REASONS.get(completion.finish_reason)
    if reason is None:
        raise MeshError(
            Reason.STAGE_FAILED,
            f"the engine ended the request with {completion.finish_reason!r}: {completion.stop_reason or 'no reason'}",
        )
    return reason


def ended_before(
    resumed: Sequence[int], max_tokens: int, min_tokens: int, stop_ids: Collection[int]
) -> frame_pb.FinishReason.ValueType | None:
    """Why the tokens that a task resumes from are its whole output already; None when it goes on."""
    if not resumed:
        return None
    if resumed[-1] in stop_ids and len(resumed) > min_tokens:
        return frame_pb.FINISH_REASON_STOP
    if len(resumed) >= max_tokens:
        return frame_pb.FINISH_REASON_LENGTH
    return None

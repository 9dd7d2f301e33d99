"""Which tensor a frame or a task's event refers to, and how large a frame's bytes are, wherever they are."""

from __future__ import annotations

from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb


def reference_in(message: frame_pb.Frame | stage_pb.TaskEvent) -> tensor_pb.TensorRef | None:
    """What its producer keeps for it; None when all its bytes are inline."""
    # Both name these the same, and both are unions, so that at most one is set.
    if message.HasField("media") and message.media.HasField("ref"):
        return message.media.ref
    if message.HasField("audio_chunk") and message.audio_chunk.samples.HasField("ref"):
        return message.audio_chunk.samples.ref
    if message.HasField("tensor") and message.tensor.value.HasField("ref"):
        return message.tensor.value.ref
    return None


def size_of(frame: frame_pb.Frame) -> int:
    """Bytes of a frame's file, sound or tensor; 0 for any other."""
    if (reference := reference_in(frame)) is not None:
        return reference.size_bytes
    if frame.HasField("media"):
        return len(frame.media.data)
    value = frame.audio_chunk.samples if frame.HasField("audio_chunk") else frame.tensor.value
    return len(value.inline.data)

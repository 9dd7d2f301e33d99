"""Frames whose bytes stayed with their replica."""

from __future__ import annotations

from stagemesh.references import reference_in
from stagemesh.v1 import frame_pb2 as frame_pb


def for_client(frame: frame_pb.Frame) -> frame_pb.Frame:
    """The frame as clients get it: addresses inside the mesh are not for them, `FetchOutput` is."""
    if reference_in(frame) is None:
        return frame
    copy = frame_pb.Frame()
    copy.CopyFrom(frame)
    reference = reference_in(copy)
    assert reference is not None
    for name in ("endpoint", "host_id", "shared_memory"):
        reference.ClearField(name)
    return copy

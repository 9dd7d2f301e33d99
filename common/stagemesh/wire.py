"""Plain values as the wire has them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import duration_pb2

from stagemesh.v1 import frame_pb2 as frame_pb

MODALITIES: Mapping[str, frame_pb.Modality.ValueType] = {
    "text": frame_pb.MODALITY_TEXT,
    "image": frame_pb.MODALITY_IMAGE,
    "audio": frame_pb.MODALITY_AUDIO,
    "video": frame_pb.MODALITY_VIDEO,
    "latent": frame_pb.MODALITY_LATENT,
}
"""Kinds of output by the names that pipeline files and requests use."""


def supported_tasks(output_type: str) -> list[str]:
    """What a stage with this kind of output does, in the words of its metadata."""
    return ["speech" if output_type == "audio" else "generate"]


def duration(seconds: float) -> duration_pb2.Duration:
    """Seconds as a message; below zero is zero."""
    whole, nanos = divmod(max(round(seconds * 1e9), 0), 1_000_000_000)
    return duration_pb2.Duration(seconds=whole, nanos=nanos)


def enum_word(enum: Any, value: int) -> str:
    """`MODALITY_IMAGE` as "image"; a value that this process does not know as "unknown (7)"."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    try:
        return str(enum.Name(value)).removeprefix(prefix).lower()
    except ValueError:
        return f"unknown ({value})"  # the peer is newer


def whole_numbers(value: Any) -> Any:
    """A `Struct` has floats only: whole ones become int again, all the way down."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [whole_numbers(item) for item in value]
    if isinstance(value, Mapping):
        return {key: whole_numbers(item) for key, item in value.items()}
    return value

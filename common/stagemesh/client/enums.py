"""Enum values of the wire as words for people."""

from __future__ import annotations

from typing import Any


def enum_word(enum: Any, value: int) -> str:
    """`MODALITY_IMAGE` as "image"; a value that this client does not know as "unknown (7)"."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    try:
        return str(enum.Name(value)).removeprefix(prefix).lower()
    except ValueError:
        return f"unknown ({value})"  # the peer is newer

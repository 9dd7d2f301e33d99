"""Sentences that several rooms of the head need."""

from __future__ import annotations

from collections.abc import Iterable

from stagemesh.config import suggest
from stagemesh.rpc.errors import MeshError, Reason, invalid


def hint(name: str, names: Iterable[str]) -> str:
    """ "; did you mean X?" to end a sentence with, or nothing."""
    near = suggest(name, names)
    return f"; {near}" if near else ""


def pipeline_named(name: str, served: Iterable[str], field: str = "pipeline") -> str:
    """The one of `served` of that name, or the only one for the empty name.

    Raises:
        MeshError: UNKNOWN_PIPELINE; INVALID_REQUEST that names `field`, no name where there are several.
    """
    names = list(served)
    if not name and len(names) == 1:
        return names[0]
    there = ", ".join(names) or "none"
    if not name:
        raise invalid(field, name, f"this head serves several: name one of {there}")
    if name not in names:
        raise MeshError(
            Reason.UNKNOWN_PIPELINE,
            f"{field}: {name!r}: not served here; pipelines are {there}{hint(name, names)}",
            pipeline=name,
        )
    return name

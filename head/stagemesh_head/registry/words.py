"""Sentences that several rooms of the registry need."""

from __future__ import annotations

from collections.abc import Iterable

from stagemesh.config import suggest


def hint(name: str, names: Iterable[str]) -> str:
    """ "; did you mean X?" to end a sentence with, or nothing."""
    near = suggest(name, names)
    return f"; {near}" if near else ""

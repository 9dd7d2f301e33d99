"""Where each value of a configuration came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]
"""Keys and list positions from the root of a tree."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one value was written."""

    source: str
    """A file, a flag such as "--stage-overrides", or "default"."""
    line: int = 0
    """Line in the file, from 1; 0 where there are no lines."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


DEFAULT = Origin("default")


class Origins:
    """Origins by path. A path without one of its own has that of the nearest path above it."""

    def __init__(self, at: Mapping[Path, Origin] | None = None) -> None:
        self._at: dict[Path, Origin] = dict(at or {})

    def __setitem__(self, path: Path, origin: Origin) -> None:
        self._at[path] = origin

    def __getitem__(self, path: Path) -> Origin:
        for length in range(len(path), -1, -1):
            if (origin := self._at.get(path[:length])) is not None:
                return origin
        return DEFAULT

    def below(self, path: Path) -> Iterator[tuple[Path, Origin]]:
        """The origins at and below `path`, by the rest of their path."""
        for other, origin in self._at.items():
            if other[: len(path)] == path:
                yield other[len(path) :], origin

    def replace_below(self, path: Path, origin: Origin) -> None:
        """Forget what lies below `path`: it has one origin now."""
        for other in [other for other in self._at if other[: len(path)] == path]:
            del self._at[other]
        self._at[path] = origin

    def copy(self) -> Origins:
        """An independent copy."""
        return Origins(self._at)


@dataclass(slots=True)
class Tree:
    """Plain data (mappings, lists, scalars) with the origin of each value."""

    data: dict[str, Any]
    origins: Origins


def show_path(path: Path) -> str:
    """`stages[1].runtime.devices`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")

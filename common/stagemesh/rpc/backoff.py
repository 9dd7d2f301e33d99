"""Pauses between tries that fail: full jitter below an exponential ceiling.

Full jitter (a uniform draw from zero to the ceiling) spreads callers that all lost the same peer at the same moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """One caller's pauses; `reset` after a success."""

    def __init__(
        self,
        base_s: float,
        cap_s: float,
        *,
        floor_s: float = 0.02,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """
        Args:
            base_s: ceiling of the first pause, in seconds; it doubles with every failure.
            cap_s: ceiling of all later ones.
            floor_s: no pause is shorter, so that a lucky draw makes no busy loop.
        """
        if not 0 < floor_s <= base_s <= cap_s:
            raise ValueError(f"backoff: want 0 < floor <= base <= cap, got {floor_s:g}, {base_s:g}, {cap_s:g} s")
        self._base_s, self._cap_s, self._floor_s = base_s, cap_s, floor_s
        self._uniform = uniform
        self.failures = 0
        """Pauses since the last reset."""

    @property
    def ceiling_s(self) -> float:
        """Longest that the next pause can be."""
        # The exponent is bounded: a float overflows after a thousand failures.
        return min(self._cap_s, self._base_s * 2.0 ** min(self.failures, 64))

    def next_s(self) -> float:
        """Length of the next pause, in seconds."""
        ceiling = self.ceiling_s
        self.failures += 1
        return self._uniform(self._floor_s, ceiling)

    def reset(self) -> None:
        """Begin anew after a success."""
        self.failures = 0

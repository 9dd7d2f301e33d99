"""Prefix affinity: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b

from stagemesh_head.routing.policies import Candidate, LeastQueueLength, Policy, RouteHint

POINTS_PER_REPLICA = 64
LOAD_FACTOR = 1.25
"""A replica takes at most this share above the mean; the overflow goes to the next on the ring."""


def _point(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


class PrefixAffinity(Policy):
    """Equal sessions, or equal prompt beginnings, go to the same replica while its load allows it.

    A replica that comes or goes moves only the keys that are its own.
    """

    def __init__(self, load_factor: float = LOAD_FACTOR) -> None:
        self._load_factor = load_factor
        self._ring_ids: tuple[int, ...] = ()
        self._ring: list[tuple[int, int]] = []
        self._without_key = LeastQueueLength()

    def choose(self, candidates: Sequence[Candidate], hint: RouteHint) -> Candidate:
        """The first replica clockwise from the key whose load is below the bound."""
        key = hint.session_id.encode() or hint.prefix
        if not key or len(candidates) == 1:
            return self._without_key.choose(candidates, hint)
        by_id = {candidate.replica_id: candidate for candidate in candidates}
        self._build_ring(tuple(by_id))
        bound = math.ceil(self._load_factor * (sum(c.inflight for c in candidates) + 1) / len(candidates))
        start = bisect_right(self._ring, (_point(key), -1))
        for offset in range(len(self._ring)):
            candidate = by_id[self._ring[(start + offset) % len(self._ring)][1]]
            if candidate.inflight < bound:
                return candidate
        return self._without_key.choose(candidates, hint)

    def _build_ring(self, ids: tuple[int, ...]) -> None:
        if ids == self._ring_ids:
            return
        self._ring_ids = ids
        self._ring = sorted((_point(f"{i}/{n}".encode()), i) for i in ids for n in range(POINTS_PER_REPLICA))

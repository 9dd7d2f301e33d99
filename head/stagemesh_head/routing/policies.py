"""Load-balancing policies: which of the replicas that can take a task gets it.

A policy only chooses; the pool reserves in the same step, so that two picks never see the same count.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RouteHint:
    """What a policy may know of the request it places."""

    request_id: str = ""
    session_id: str = ""
    """Requests of one session belong together."""
    prefix: bytes = b""
    """First bytes of the prompt, as they decide about a prefix cache."""


class Candidate(Protocol):
    """What a policy may know of a replica."""

    @property
    def replica_id(self) -> int:
        """Slot number within the stage."""

    @property
    def inflight(self) -> int:
        """Tasks that this head has bound to it."""

    @property
    def reported(self) -> int:
        """Tasks, running and waiting, in the replica's last load report."""

    @property
    def last_pick(self) -> int:
        """Number of the pick that chose it last; smaller is longer ago."""


class Policy(ABC):
    """Chooses one of several candidates."""

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate], hint: RouteHint) -> Candidate:
        """One of `candidates`, which is never empty and is ordered by replica id."""


class Random(Policy):
    """Any of them, evenly."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[Candidate], hint: RouteHint) -> Candidate:
        """An even draw."""
        return candidates[self._random.randrange(len(candidates))]


class RoundRobin(Policy):
    """The next slot number after the last one, so that a replica that comes or goes makes no other skip or repeat."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Sequence[Candidate], hint: RouteHint) -> Candidate:
        """The smallest id above the last one, else the smallest."""
        chosen = next((c for c in candidates if c.replica_id > self._last), candidates[0])
        self._last = chosen.replica_id
        return chosen


def load_of(candidate: Candidate) -> tuple[int, int, int]:
    """Sort key of the least loaded: own tasks in flight, reported load, then who waited longest for a pick."""
    return candidate.inflight, candidate.reported, candidate.last_pick


class LeastQueueLength(Policy):
    """The replica with the fewest tasks in flight from this head, then the smallest reported load."""

    def choose(self, candidates: Sequence[Candidate], hint: RouteHint) -> Candidate:
        """The least loaded one."""
        return candidates[0] if len(candidates) == 1 else min(candidates, key=load_of)


class PowerOfTwo(Policy):
    """The less loaded of two drawn at random: near the best balance without herding of several heads."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[Candidate], hint: RouteHint) -> Candidate:
        """The better of two."""
        if len(candidates) <= 2:
            return min(candidates, key=load_of)
        return min(self._random.sample(list(candidates), 2), key=load_of)


PolicyFactory = Callable[[], Policy]

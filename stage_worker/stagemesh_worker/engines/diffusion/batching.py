"""Which requests share one call of the pipeline: a queue that knows time only as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """One request in the queue."""

    payload: T
    key: str | None
    """Requests with the same key may share a call; None: it shares with nobody."""
    size: int
    """Pictures it wants, from 1."""
    priority: int
    """Larger is later."""
    number: int
    """Order of arrival."""
    since: float
    """Time of arrival, in seconds."""


class BatchQueue(Generic[T]):
    """Requests by priority, then by arrival. The first one is never passed over; others may join it.

    Args:
        max_size: most pictures in a call; a request that alone wants more runs alone.
        wait_s: how long the first one waits for others.
    """

    def __init__(self, max_size: int, wait_s: float) -> None:
        self._max_size = max_size
        self._wait_s = wait_s if max_size > 1 else 0.0
        self._waiting: list[Waiting[T]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, payload: T, *, key: str | None, size: int, priority: int, now: float) -> None:
        """Put a request at the end of its priority."""
        self._arrivals += 1
        self._waiting.append(Waiting(payload, key, size, priority, self._arrivals, now))
        self._waiting.sort(key=lambda waiting: (waiting.priority, waiting.number))

    def remove(self, payload: T) -> bool:
        """Take a request out; False when it is not there."""
        kept = [waiting for waiting in self._waiting if waiting.payload is not payload]
        removed = len(kept) < len(self._waiting)
        self._waiting = kept
        return removed

    def due(self, now: float) -> float | None:
        """Seconds until `take` should be called: 0 is now, None is not before something was added."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        if first.key is None or sum(waiting.size for waiting in self._batch()) >= self._max_size:
            return 0.0
        return max(0.0, first.since + self._wait_s - now)

    def take(self) -> list[T]:
        """Take the next batch out; empty when nothing waits."""
        batch = self._batch()
        taken = {waiting.number for waiting in batch}
        self._waiting = [waiting for waiting in self._waiting if waiting.number not in taken]
        return [waiting.payload for waiting in batch]

    def drain(self) -> list[T]:
        """Take everything out."""
        everything = [waiting.payload for waiting in self._waiting]
        self._waiting = []
        return everything

    def _batch(self) -> list[Waiting[T]]:
        batch: list[Waiting[T]] = []
        size = 0
        for waiting in self._waiting:
            joins = not batch or (waiting.key is not None and waiting.key == batch[0].key)
            if joins and (not batch or size + waiting.size <= self._max_size):
                batch.append(waiting)
                size += waiting.size
        return batch

"""Changes of rows by revision, for followers. One entry a replica: who is slow misses steps, never the outcome."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh_head.registry.rows import ReplicaKey

MAX_TOMBSTONES = 10_000
COALESCE_S = 0.02
"""A follower gets at most one message in this time."""
LOAD_PERIOD_S = 1.0
"""Changes of load alone are news that can wait so long."""


@dataclass(frozen=True, slots=True)
class Change:
    """The last change of one slot."""

    revision: int
    incarnation: str
    is_removed: bool


@dataclass(frozen=True, slots=True)
class Delta:
    """What a follower must know to get from one revision to another."""

    revision: int
    changed: tuple[ReplicaKey, ...]
    removed: tuple[tuple[ReplicaKey, str], ...]


class ChangeLog:
    """The last change of every slot, in order of revision."""

    def __init__(self) -> None:
        self.revision = 0
        self.floor = 0
        """Followers at or above this revision can go on from there."""
        self._state_revision = 0
        """Of the last change that was more than load."""
        self._changes: OrderedDict[ReplicaKey, Change] = OrderedDict()
        self._tombstones: OrderedDict[ReplicaKey, int] = OrderedDict()
        self._news = asyncio.Event()
        self._is_closed = False

    def note(self, key: ReplicaKey, incarnation: str, *, is_removed: bool, only_load: bool) -> None:
        """A row changed or is no more; takes the next revision."""
        self.revision += 1
        self._changes[key] = Change(self.revision, incarnation, is_removed)
        self._changes.move_to_end(key)
        self._tombstones.pop(key, None)
        if is_removed:
            self._tombstones[key] = self.revision
            if len(self._tombstones) > MAX_TOMBSTONES:
                oldest, self.floor = self._tombstones.popitem(last=False)
                del self._changes[oldest]
        if not only_load:
            self._state_revision = self.revision
            self._wake()

    def close(self) -> None:
        """End all followers."""
        self._is_closed = True
        self._wake()

    def check(self, revision: int) -> None:
        """Raise REVISION_TOO_OLD unless a follower can go on from `revision`."""
        if not self.floor <= revision <= self.revision:
            raise MeshError(
                Reason.REVISION_TOO_OLD,
                f"revision {revision} is not kept; {self.floor} to {self.revision} are: start with a snapshot",
            )

    def since(self, revision: int) -> Delta:
        """Everything that changed after `revision`."""
        changed, removed = [], []
        for key in reversed(self._changes):
            change = self._changes[key]
            if change.revision <= revision:
                break
            if change.is_removed:
                removed.append((key, change.incarnation))
            else:
                changed.append(key)
        return Delta(self.revision, tuple(reversed(changed)), tuple(reversed(removed)))

    async def follow(self, revision: int, clock: Callable[[], float]) -> AsyncIterator[Delta]:
        """Deltas after `revision`, for ever: at once after a quiet time, else every `COALESCE_S`.

        Raises:
            MeshError: REVISION_TOO_OLD when the follower was too slow; UNREACHABLE when the head stops.
        """
        last_sent = clock()
        while not self._is_closed:
            elapsed = clock() - last_sent
            if self._state_revision > revision:
                if elapsed < COALESCE_S:
                    await asyncio.sleep(COALESCE_S - elapsed)
            elif self.revision == revision or elapsed < LOAD_PERIOD_S:
                # Nothing, or loads only: real news end the wait, else the loads are old enough after it.
                await _wait(self._news, LOAD_PERIOD_S - elapsed if elapsed < LOAD_PERIOD_S else LOAD_PERIOD_S)
                continue
            self.check(revision)
            delta = self.since(revision)
            yield delta
            revision, last_sent = delta.revision, clock()
        raise MeshError(Reason.UNREACHABLE, "the head stops")

    def _wake(self) -> None:
        # Whoever waits on this event wakes; the next waits on a new one.
        self._news.set()
        self._news = asyncio.Event()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)

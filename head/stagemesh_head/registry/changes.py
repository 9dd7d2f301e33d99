"""Changes of rows by revision, for followers. One entry a replica: who is slow misses steps, never the outcome."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh_head.registry.rows import ReplicaKey

MAX_TOMBSTONES = 10_000
COALESCE_S = 0.02
"""Followers get at most one message in this time, and the first one after a quiet time at once."""
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
        self._published = 0
        """Followers go up to here."""
        self._plan: asyncio.TimerHandle | None = None
        self._planned_for = 0.0
        self._last_publish = -LOAD_PERIOD_S
        self._last_delta: tuple[int, int, Delta] | None = None
        self._changes: OrderedDict[ReplicaKey, Change] = OrderedDict()
        self._tombstones: OrderedDict[ReplicaKey, int] = OrderedDict()
        self._news = asyncio.Event()
        self._is_closed = False

    def note(self, key: ReplicaKey, incarnation: str, *, is_removed: bool, only_load: bool) -> None:
        """A row changed or is no more; takes the next revision. Needs a running event loop."""
        self.revision += 1
        self._changes[key] = Change(self.revision, incarnation, is_removed)
        self._changes.move_to_end(key)
        self._tombstones.pop(key, None)
        if is_removed:
            self._tombstones[key] = self.revision
            if len(self._tombstones) > MAX_TOMBSTONES:
                oldest, self.floor = self._tombstones.popitem(last=False)
                del self._changes[oldest]
        self._schedule(LOAD_PERIOD_S if only_load else COALESCE_S)

    def close(self) -> None:
        """End all followers."""
        self._is_closed = True
        if self._plan is not None:
            self._plan.cancel()
        self._publish()

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

    async def follow(self, revision: int) -> AsyncIterator[Delta]:
        """Deltas after `revision`, for ever. Followers that keep up get the same ones at the same time.

        Raises:
            MeshError: REVISION_TOO_OLD when the follower was too slow; UNREACHABLE when the head stops.
        """
        while not self._is_closed:
            if revision >= self._published:
                await self._news.wait()
                continue
            self.check(revision)
            delta = self._since_cached(revision)
            yield delta
            revision = delta.revision
        raise MeshError(Reason.UNREACHABLE, "the head stops")

    def _since_cached(self, revision: int) -> Delta:
        if self._last_delta is None or self._last_delta[:2] != (revision, self.revision):
            self._last_delta = (revision, self.revision, self.since(revision))
        return self._last_delta[2]

    def _schedule(self, delay_s: float) -> None:
        """Publish so long after the last time, or now; an earlier plan stays."""
        loop = asyncio.get_running_loop()
        when = max(loop.time(), self._last_publish + delay_s)
        if self._plan is not None:
            if self._planned_for <= when:
                return
            self._plan.cancel()
        self._planned_for = when  # uvloop's handles do not always tell
        self._plan = loop.call_at(when, self._publish)

    def _publish(self) -> None:
        self._plan = None
        self._last_publish = asyncio.get_running_loop().time()
        self._published = self.revision
        # Whoever waits on this event wakes; the next waits on a new one.
        self._news.set()
        self._news = asyncio.Event()

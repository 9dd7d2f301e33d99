"""The event log: what happened to nodes and replicas, kept for a while and followed by watchers."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable

from google.protobuf import timestamp_pb2

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh_head.registry.effects import Happened

log = logging.getLogger(__name__)

KEPT = 1_000
# What befalls a replica through its node is in the log with the node.
_LOUD = frozenset(
    {
        "node.suspect",
        "node.gone",
        "node.refused",
        "replica.failed",
        "replica.suspect",
        "replica.unreachable",
        "head.stalled",
    }
)


class EventLog:
    """Numbered events of one epoch. A watcher that falls more than `KEPT` behind sees the gap in the numbers."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        """Args: wall_clock: seconds since 1970, for people only."""
        self._wall_clock = wall_clock
        self._events: deque[admin_pb.MeshEvent] = deque(maxlen=KEPT)
        self._news = asyncio.Event()
        self._is_closed = False
        self.last_number = 0
        self.counts: Counter[str] = Counter()
        """Events by type, for metrics."""

    def add(self, happened: Happened) -> None:
        """Number it, keep it, log it, wake the watchers."""
        self.last_number += 1
        self.counts[happened.type] += 1
        time = timestamp_pb2.Timestamp()
        time.FromNanoseconds(int(self._wall_clock() * 1e9))
        event = admin_pb.MeshEvent(
            number=self.last_number,
            time=time,
            type=happened.type,
            node_id=happened.node_id,
            reason=happened.reason,
            from_state=happened.from_state,
            to_state=happened.to_state,
        )
        if happened.key is not None:
            event.replica.CopyFrom(happened.key.ref(happened.incarnation))
        self._events.append(event)
        is_loud = happened.type in _LOUD and not happened.reason.startswith(f"node {happened.node_id}:")
        level = logging.WARNING if is_loud else logging.INFO
        if log.isEnabledFor(level):
            who = " ".join(str(part) for part in (happened.key, happened.node_id and f"on {happened.node_id}") if part)
            log.log(level, "%s %s%s", happened.type, who, f": {happened.reason}" if happened.reason else "")
        self._wake()

    def close(self) -> None:
        """End all watches."""
        self._is_closed = True
        self._wake()

    async def watch(self, after_number: int, *, include_past: bool) -> AsyncIterator[admin_pb.MeshEvent]:
        """Events after a number; 0: what is new, or with `include_past` all that are kept.

        Raises:
            MeshError: REVISION_TOO_OLD for a number of another epoch; UNREACHABLE when the head stops.
        """
        if after_number > self.last_number:
            raise MeshError(
                Reason.REVISION_TOO_OLD,
                f"event {after_number} belongs to another start of the head; the last one here is {self.last_number}",
            )
        cursor = after_number or (0 if include_past else self.last_number)
        while True:
            for event in self._after(cursor):
                yield event
                cursor = event.number
            if self._is_closed:
                raise MeshError(Reason.UNREACHABLE, "the head stops")
            if cursor == self.last_number:
                await self._news.wait()

    def _after(self, number: int) -> list[admin_pb.MeshEvent]:
        missing = self.last_number - number
        if missing <= 0:
            return []
        return list(self._events)[-missing:] if missing < len(self._events) else list(self._events)

    def _wake(self) -> None:
        # Whoever waits on this event wakes; the next waits on a new one.
        self._news.set()
        self._news = asyncio.Event()

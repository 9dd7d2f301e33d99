"""What the tasks of one link have made and its writer has not sent yet.

Filled synchronously by the sinks of all tasks; whatever gathers while one message is written travels in the next.
"""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic

from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh.v1 import stage_pb2 as stage_pb

HIGH_WATER_UNITS = 65_536
"""Output units (tokens, or 64 bytes of anything else) at which tasks are held back until the writer caught up."""
MESSAGE_BYTES = 8 << 20
"""A message is closed when its events reach this size, far below the message limit of 64 MiB."""
BYTES_PER_UNIT = 64
MERGE_S = 0.002
"""Least time from a message with tokens to the next message. The first after a pause goes at once; a busy engine's
output is merged meanwhile, since a message costs the head about the same whatever it carries."""


class Outbox:
    """Pending output of one Execute stream."""

    __slots__ = ("_columns", "_events", "_load", "_room", "_taken_at", "_units", "_wake", "closed")

    def __init__(self) -> None:
        self._columns: dict[int, tuple[list[int], list[str]]] = {}
        self._events: list[tuple[stage_pb.TaskEvent, int]] = []
        self._load: replica_pb.ReplicaLoad | None = None
        self._units = 0
        self._taken_at = 0.0
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.closed = False

    @property
    def has_room(self) -> bool:
        """Whether the writer keeps up."""
        return self._units < HIGH_WATER_UNITS

    async def wait_for_room(self) -> None:
        """Wait until the writer has caught up, or the link is gone."""
        while not self.has_room and not self.closed:
            self._room.clear()
            await self._room.wait()

    def add_tokens(self, slot: int, token_ids: list[int], text: str) -> None:
        """Tokens of one task: the hot path."""
        entry = self._columns.get(slot)
        if entry is None:
            self._columns[slot] = (token_ids, [text])
            self._wake.set()
        else:
            entry[0].extend(token_ids)
            entry[1].append(text)
        self._units += len(token_ids)

    def add_event(self, event: stage_pb.TaskEvent, size_bytes: int = 0) -> None:
        """Anything else of one task; `size_bytes` of its payload, where it has one."""
        self._events.append((event, size_bytes))
        self._units += 1 + size_bytes // BYTES_PER_UNIT
        self._wake.set()

    def set_load(self, load: replica_pb.ReplicaLoad) -> None:
        """The newest load; it replaces one that was not sent."""
        self._load = load
        self._wake.set()

    def close(self) -> list[stage_pb.TaskEvent]:
        """Nobody will read on: forget everything and let no task wait. Returns the events that were not sent."""
        self.closed = True
        unsent = [event for event, _ in self._events]
        self._columns.clear()
        self._events.clear()
        self._units = 0
        self._room.set()
        self._wake.set()
        return unsent

    async def flushed(self, timeout_s: float) -> None:
        """Wait until the writer has taken everything, or the link is gone, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (self._columns or self._events) and not self.closed:
                    self._room.clear()
                    await self._room.wait()

    async def take(self) -> stage_pb.ExecuteResponse | None:
        """Wait for output and take as much as one message holds; None once closed. One caller at a time."""
        await self._wake.wait()
        pause_s = self._taken_at + MERGE_S - monotonic()
        if pause_s > 0 and self.has_room:
            await asyncio.sleep(pause_s)
        if self.closed:
            return None
        message = stage_pb.ExecuteResponse()
        if self._columns:
            # Only these: a task's first token must not wait because its `started` has just gone out.
            self._taken_at = monotonic()
            pending, self._columns = self._columns, {}
            columns = message.columns
            columns.slots.extend(pending)
            columns.counts.extend([len(token_ids) for token_ids, _ in pending.values()])
            for token_ids, _ in pending.values():
                columns.token_ids.extend(token_ids)
                self._units -= len(token_ids)
            columns.texts.extend([texts[0] if len(texts) == 1 else "".join(texts) for _, texts in pending.values()])
        self._take_events(message)
        if self._load is not None:
            message.load.CopyFrom(self._load)
            self._load = None
        if not self._events:
            self._wake.clear()
        if self.has_room:
            self._room.set()
        return message

    def _take_events(self, message: stage_pb.ExecuteResponse) -> None:
        total = taken = 0
        for event, size in self._events:
            if taken and total + size > MESSAGE_BYTES:
                break
            total += size
            taken += 1
            message.events.append(event)
            self._units -= 1 + size // BYTES_PER_UNIT
        del self._events[:taken]

"""When a client's stream is flushed: at once while the head is idle, at most every 5 to 20 ms under load.

A write to a client costs about 60 µs whatever it carries, so that under load fewer, larger messages are what makes the
head fast. The interval grows with the number of streams that are busy at the same time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import Protocol

WRITES_PER_S = 3_200.0
"""Client messages a second that the pacer aims at, as far as the largest interval allows: a fifth of a core."""
IDLE_BELOW_S = 0.002
"""An interval below this is none."""
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.005, 0.020
WINDOW_S = 0.05
"""Streams flushed within such a window count as busy."""


class Paced(Protocol):
    """A stream that waits for its moment."""

    due: float
    """When it may be flushed next; 0 before the first time."""
    last_window: int

    def flush_now(self) -> None:
        """Its moment has come."""


class Pacer:
    """One for all streams of a process, so that many waits share one timer."""

    def __init__(self) -> None:
        self.interval = 0.0
        """Shortest time between two flushes of one stream, in seconds, as of now."""
        self._window = 0
        self._window_ends = 0.0
        self._busy = 0
        self._due: deque[tuple[float, Paced]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def flushed(self, stream: Paced, now: float) -> None:
        """A stream is being flushed."""
        if now >= self._window_ends:
            self._next_window(now)
        # Moments stay on their grid: a stream as fast as the interval that is a little late once is not late for ever.
        stream.due = max(stream.due + self.interval, now) if stream.due else now + self.interval
        if stream.last_window != self._window:
            stream.last_window = self._window
            self._busy += 1

    def wait(self, stream: Paced, now: float) -> bool:
        """Whether a stream with new output must wait; then `flush_now` is called at its moment."""
        if self.interval == 0.0:
            return False
        if stream.due <= now:
            return False
        self._due.append((stream.due, stream))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(stream.due - now, self._fire)
        return True

    def _next_window(self, now: float) -> None:
        # After a quiet time the last window says nothing about now.
        busy = self._busy if now < self._window_ends + WINDOW_S else 0
        interval = busy / WRITES_PER_S
        self.interval = 0.0 if interval < IDLE_BELOW_S else min(max(interval, MIN_INTERVAL_S), MAX_INTERVAL_S)
        self._window += 1
        self._busy = 0
        self._window_ends = now + WINDOW_S

    def _fire(self) -> None:
        self._timer = None
        now = monotonic()
        # Moments are nearly in order; one that is out of it waits for its neighbours, at most an interval.
        while self._due and self._due[0][0] <= now + 0.0005:
            self._due.popleft()[1].flush_now()
        if self._due:
            delay = max(self._due[0][0] - now, 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay, self._fire)

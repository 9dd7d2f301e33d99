"""Tasks that wait for one of a bounded number of places, in order of priority."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class WaitingLine:
    """`limit` places; 0 is no bound. The smallest priority goes first, equals in order of arrival."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self.running = 0
        self.busy_since = 0.0
        """When the first of the tasks that run now came to an idle line, by the monotonic clock."""

    @property
    def waiting(self) -> int:
        """Tasks without a place."""
        return sum(not future.done() for _, _, future in self._waiting)

    @asynccontextmanager
    async def place(self, priority: int) -> AsyncIterator[None]:
        """Wait for a place and hold it."""
        if self._limit and self.running >= self._limit:
            future = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._order), future))
            try:
                await future  # its place is counted by the one who gives it
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self._leave()
                raise
        else:
            self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        if not self.running:
            self.busy_since = time.monotonic()
        self.running += 1

    def _leave(self) -> None:
        while self._waiting:
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
                return
        self.running -= 1

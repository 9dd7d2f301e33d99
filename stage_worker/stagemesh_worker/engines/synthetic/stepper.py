"""The one loop that makes the tokens of all synthetic tasks: a tick emits for every task that is due.

A coroutine that wakes per token and task would cost ten times as much as the token itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from dataclasses import dataclass, field

from stagemesh_worker.engines.base import TaskSink
from stagemesh_worker.engines.synthetic.content import VOCABULARY, TokenStream

GRID_S = 0.001
"""Paced tokens of different tasks that are due within a millisecond share a tick."""


@dataclass(slots=True, eq=False)
class TokenRun:
    """Tokens that one task still has to make."""

    stream: TokenStream
    sink: TaskSink
    position: int
    end: int
    """Position after the last token."""
    text_end: int | None = None
    """Characters of text in all, where a stop text cuts it; None: all of it."""
    text_made: int = 0
    held_text: str = ""
    """Text that goes out with the next token, such as text a lost replica held back."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all tokens are made, or when it was parked because its consumer is slow."""


class Stepper:
    """Makes tokens of all runs, at `tokens_per_second` each or as fast as it can."""

    def __init__(self, tokens_per_second: float) -> None:
        self._interval = 1.0 / tokens_per_second if tokens_per_second else 0.0
        self._due: list[tuple[float, int, TokenRun]] = []
        self._order = itertools.count()
        self._gone: set[TokenRun] = set()
        self._wake = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self.made = 0
        """Tokens and steps made since start."""
        self.steps = 0
        """Ticks since start."""
        self.limit: int | None = None
        """`made` at which it goes no further."""
        self.limit_reached = asyncio.Event()
        self.last_step_at = time.monotonic()

    @property
    def paused(self) -> bool:
        """Whether `pause` stopped it."""
        return not self._running.is_set()

    def pause(self) -> None:
        """Make nothing until `resume`."""
        self._running.clear()

    def resume(self) -> None:
        """Go on."""
        self._running.set()
        self.last_step_at = time.monotonic()

    def add(self, run: TokenRun, delay_s: float) -> None:
        """Make the tokens of `run`, the first after `delay_s` seconds."""
        run.done.clear()
        heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._order), run))
        self._wake.set()

    def remove(self, run: TokenRun) -> None:
        """Make no more of `run`; harmless when it is done."""
        if not run.done.is_set():
            self._gone.add(run)

    async def step_once(self) -> None:
        """Count one step of work that is not tokens; waits while paused, and for ever once the limit is reached."""
        await self._running.wait()
        await self._stop_at_limit()
        self.made += 1
        self.steps += 1
        self.last_step_at = time.monotonic()

    async def loop(self) -> None:
        """Run until cancelled."""
        while True:
            if not self._due:
                self._wake.clear()
                await self._wake.wait()
            await self._running.wait()
            now = time.monotonic()
            wait = self._due[0][0] - now
            if wait > 0:
                self._wake.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._wake.wait()
                continue
            await self._stop_at_limit()
            self._tick(now)
            await asyncio.sleep(0)

    def _tick(self, now: float) -> None:
        """Make one token of each run that is due."""
        due, horizon, interval = self._due, now + GRID_S, self._interval
        again = []
        # What comes back with the same due time waits for the next tick, so that none is served twice in one.
        while due and due[0][0] <= horizon:
            at, order, run = heapq.heappop(due)
            if run in self._gone:
                self._gone.discard(run)
                continue
            if not run.sink.writable:
                run.done.set()  # parked: its task waits for credit and brings it back
                continue
            self._emit(run)
            self.made += 1
            if run.position < run.end:
                again.append((max(at + interval, now - 1.0) if interval else now, order, run))
            else:
                run.done.set()
            if self.made == self.limit:
                break
        for entry in again:
            heapq.heappush(due, entry)
        self.steps += 1
        self.last_step_at = now

    @staticmethod
    def _emit(run: TokenRun) -> None:
        token_id = run.stream.token(run.position)
        run.position += 1
        text = VOCABULARY[token_id]
        if run.text_end is not None:
            text = text[: max(0, run.text_end - run.text_made)]
            run.text_made += len(text)
        if run.held_text:
            text, run.held_text = run.held_text + text, ""
        run.sink.tokens((token_id,), text)

    async def _stop_at_limit(self) -> None:
        if self.limit is not None and self.made >= self.limit:
            self.limit_reached.set()
            await asyncio.Event().wait()

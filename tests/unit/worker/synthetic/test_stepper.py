"""The loop that makes all tokens: fair, paced, held back by slow consumers, and fast."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from stagemesh_worker.engines.synthetic.content import TokenStream
from stagemesh_worker.engines.synthetic.stepper import Stepper, TokenRun
from stagemesh_worker.engines.synthetic.waiting import WaitingLine


class Counter:
    """Counts tokens, and may stop being writable."""

    def __init__(self, log: list[int] | None = None, name: int = 0, room: int = 1 << 30) -> None:
        self.count = 0
        self.room = room
        self._log = log
        self._name = name

    @property
    def writable(self) -> bool:
        return self.count < self.room

    def tokens(self, token_ids: Sequence[int], text: str) -> None:
        self.count += 1
        if self._log is not None:
            self._log.append(self._name)


def _run(sink: Counter, end: int) -> TokenRun:
    return TokenRun(TokenStream.of(b"x"), sink, 0, end)  # type: ignore[arg-type]


async def _finish(stepper: Stepper, *runs: TokenRun) -> None:
    loop = asyncio.create_task(stepper.loop())
    try:
        async with asyncio.timeout(20):
            for run in runs:
                await run.done.wait()
    finally:
        loop.cancel()


async def test_tokens_of_all_tasks_are_made_in_turn() -> None:
    log: list[int] = []
    runs = [_run(Counter(log, name), 3) for name in range(4)]
    stepper = Stepper(0)
    for run in runs:
        stepper.add(run, 0)
    await _finish(stepper, *runs)
    assert log == [0, 1, 2, 3] * 3
    assert (stepper.made, stepper.steps) == (12, 3)


async def test_rate_is_kept() -> None:
    stepper, run = Stepper(100), _run(Counter(), 31)
    began = time.monotonic()
    stepper.add(run, 0.1)
    await _finish(stepper, run)
    assert 0.4 <= time.monotonic() - began < 1.5


async def test_slow_consumer_is_parked_and_holds_nobody_else_back() -> None:
    slow, quick = _run(Counter(room=5), 50), _run(Counter(), 50)
    stepper = Stepper(0)
    stepper.add(slow, 0)
    stepper.add(quick, 0)
    await _finish(stepper, slow, quick)
    assert (slow.position, quick.position) == (5, 50)
    slow.sink.room = 50  # type: ignore[attr-defined]
    stepper.add(slow, 0)
    await _finish(stepper, slow)
    assert slow.position == 50


async def test_removed_run_makes_nothing_more() -> None:
    gone, other = _run(Counter(), 1000), _run(Counter(), 50)
    stepper = Stepper(0)
    stepper.add(gone, 0)
    stepper.add(other, 0)
    stepper.remove(gone)
    await _finish(stepper, other)
    assert gone.position == 0


async def test_it_stops_at_its_limit() -> None:
    stepper, run = Stepper(0), _run(Counter(), 100)
    stepper.limit = 30
    stepper.add(run, 0)
    loop = asyncio.create_task(stepper.loop())
    await asyncio.wait_for(stepper.limit_reached.wait(), 5)
    assert (stepper.made, run.position) == (30, 30)
    loop.cancel()


async def test_paused_stepper_makes_nothing() -> None:
    stepper, run = Stepper(0), _run(Counter(), 10)
    stepper.pause()
    stepper.add(run, 0)
    loop = asyncio.create_task(stepper.loop())
    for _ in range(20):
        await asyncio.sleep(0)
    assert run.position == 0
    stepper.resume()
    await asyncio.wait_for(run.done.wait(), 5)
    loop.cancel()


async def test_waiting_line_serves_by_priority_and_gives_places_back() -> None:
    line, order = WaitingLine(1), []

    async def visit(name: str, priority: int) -> None:
        async with line.place(priority):
            order.append(name)
            await asyncio.sleep(0)

    visits = [asyncio.create_task(visit(*who)) for who in (("first", 9), ("late", 5), ("soon", 1), ("also", 1))]
    await asyncio.sleep(0)
    assert (line.running, line.waiting) == (1, 3)
    await asyncio.gather(*visits)
    assert order == ["first", "soon", "also", "late"]
    assert (line.running, line.waiting) == (0, 0)


@pytest.mark.parametrize("cancel_at", range(4))
async def test_cancelled_visitor_loses_no_place(cancel_at: int) -> None:
    line = WaitingLine(1)

    async def visit() -> None:
        async with line.place(0):
            await asyncio.sleep(0)

    visits = [asyncio.create_task(visit()) for _ in range(4)]
    for _ in range(cancel_at):
        await asyncio.sleep(0)
    visits[cancel_at].cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(*visits, return_exceptions=True)
    assert (line.running, line.waiting) == (0, 0)

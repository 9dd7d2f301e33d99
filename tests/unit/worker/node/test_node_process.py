"""One replica process: heard, read, and ended with all that it started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from node_harness import eventually

from stagemesh_worker.node import replica_process
from stagemesh_worker.node.replica_process import ReplicaProcess
from stagemesh_worker.replica import control


@pytest.fixture(autouse=True)
def misbehaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_process, "MODULE", "misbehaving")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


class Watched:
    """A process, and what it told."""

    def __init__(self, mood: str) -> None:
        self.messages: list[control.Message] = []
        self.lines: list[str] = []
        self.codes: list[int] = []
        assign = control.Assign("p", "r", {"name": mood}, 0, "i")
        self.process = ReplicaProcess(
            f"{mood}/0",
            assign,
            on_message=self.messages.append,
            on_line=self.lines.append,
            on_end=self.codes.append,
        )

    async def hears(self, probe: Callable[[control.Message], bool]) -> None:
        await eventually(lambda: [message for message in self.messages if probe(message)])

    async def end(self) -> int:
        async with asyncio.timeout(20):
            await self.process.task
        assert len(self.codes) == 1
        return self.codes[0]


async def test_what_a_process_started_is_ended_with_it() -> None:
    watched = Watched("orphans")
    await eventually(lambda: "deaf" in watched.lines)
    [line] = [line for line in watched.lines if line.startswith("child ")]
    child = psutil.Process(int(line.split()[1]))
    watched.process.tell(control.Stop())
    assert await watched.end() == 7
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def test_one_that_ignores_sigterm_is_killed() -> None:
    watched = Watched("deaf")
    await watched.hears(lambda message: isinstance(message, control.Ready))
    watched.process.terminate()
    seen = len(watched.messages)
    await eventually(lambda: len(watched.messages) > seen + 2)
    watched.process.kill()
    assert await watched.end() == -9
    watched.process.kill()
    watched.process.terminate()
    watched.process.tell(control.Stop())


async def test_one_that_speaks_nonsense_is_hung_up_on(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched("garbage")
    assert await watched.end() == 0
    assert "says what cannot be read" in caplog.text
    assert watched.lines == ["the agent is gone, it seems"]


async def test_output_is_cut_into_lines_of_bounded_length_and_the_last_are_kept() -> None:
    watched = Watched("chatty")
    assert await watched.end() == 3
    assert control.Failed("START_FAILED", "enough said") in watched.messages
    *cut, bar, rest = watched.lines
    assert "".join(cut) == "x" * 100_000
    assert max(map(len, cut)) <= replica_process.MAX_LINE_BYTES + 65536
    assert (bar, rest) == ("100%", "no newline at the end")
    assert list(watched.process.tail)[-2:] == [bar, rest]


async def test_a_task_that_is_cancelled_kills_its_process() -> None:
    watched = Watched("deaf")
    await watched.hears(lambda message: isinstance(message, control.Ready))
    own = psutil.Process(watched.process.pid)
    watched.process.task.cancel()
    await asyncio.gather(watched.process.task, return_exceptions=True)
    await eventually(lambda: not own.is_running() or own.status() == psutil.STATUS_ZOMBIE)
    own.wait(5)

"""Steady load on a mesh of processes, and what its clients saw."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from stagemesh import TextDelta
from tests.mesh.faults.processes import Processes

REQUEST_S = 30.0


def text_of(mesh: Processes, prompt: str = "a wish", **options: object) -> str:
    """The whole text of one request, over a connection of its own."""
    with mesh.client as client:
        frames = client.generate(prompt, timeout=REQUEST_S, **options)  # type: ignore[arg-type]
        return "".join(frame.text for frame in frames if isinstance(frame, TextDelta))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request; times are those of the monotonic clock."""

    started: float
    ended: float
    error: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.started


class Load:
    """Requests one after the other from a few threads; what failed is kept. `options` are those of `generate`."""

    def __init__(self, mesh: Processes, threads: int = 3, **options: object) -> None:
        self.answered: list[Outcome] = []
        self.failed: list[Outcome] = []
        self._mesh, self._options = mesh, options
        self._expected: dict[int, str] = {}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(threads)]

    @property
    def failures(self) -> list[str]:
        """Of each request that failed, why."""
        return [outcome.error for outcome in self.failed]

    @property
    def done(self) -> int:
        """Requests that were answered."""
        return len(self.answered)

    def ask(self, number: int) -> None:
        """One request of client `number`, to its end."""
        started, error = time.monotonic(), ""
        try:
            text = text_of(self._mesh, f"wish {number}", **self._options)
            if text != self._expected.setdefault(number, text):
                error = f"{text!r} is not {self._expected[number]!r}"
        except Exception as caught:
            error = repr(caught)
        outcome = Outcome(started, time.monotonic(), error)
        (self.failed if error else self.answered).append(outcome)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the requests that run finish."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * REQUEST_S)

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            self.ask(number)

    def __enter__(self) -> Load:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

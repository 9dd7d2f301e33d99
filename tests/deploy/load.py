"""Requests one after the other from a few clients, while a test restarts what serves them."""

from __future__ import annotations

import signal
import threading
import time

from stagemesh import Client, Diffusion, Image, TextDelta
from tests.mesh.faults.processes import Process, eventually

DRAIN_S = 30.0


class Load:
    """A context in which `threads` clients ask without a pause; each expects the same answer every time, and
    ends with the first that fails.

    Attributes:
        done: answers that were right.
        failures: one line for each answer that was an error or wrong.
        longest_s: seconds of the slowest right answer.
    """

    def __init__(
        self,
        address: str,
        threads: int = 3,
        sampling: dict[str, Diffusion] | None = None,
        max_retries: int = 3,
    ) -> None:
        """
        Args:
            sampling: of each request; what it leaves to chance must not show in the answers.
            max_retries: of each client; the usual 3 do not cover a head that is away for several seconds.
        """
        self.failures: list[str] = []
        self.done = 0
        self.longest_s = 0.0
        self._address, self._sampling, self._max_retries = address, sampling, max_retries
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]

    def _run(self, number: int) -> None:
        expected = None
        with Client(self._address, max_retries=self._max_retries) as client:
            while not self._stop.is_set():
                started = time.monotonic()
                try:
                    answer = self._answer(client, f"wish {number}")
                except Exception as error:
                    self.failures.append(repr(error))
                    return
                expected = expected or answer
                if answer != expected:
                    self.failures.append(f"{answer!r} is not {expected!r}")
                with self._lock:
                    self.done += 1
                    self.longest_s = max(self.longest_s, time.monotonic() - started)

    def _answer(self, client: Client, prompt: str) -> tuple[str, bytes]:
        frames = list(client.generate(prompt, sampling=self._sampling, timeout=60))
        text = "".join(frame.text for frame in frames if isinstance(frame, TextDelta))
        return text, b"".join(frame.data for frame in frames if isinstance(frame, Image))

    def goes_on(self, more: int = 3) -> None:
        """Wait until `more` further requests have been answered."""
        seen = self.done
        eventually("load goes on", lambda: self.done >= seen + more or bool(self.failures))
        assert not self.failures, self.failures

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def finish(process: Process) -> None:
    """End a process as an operator or a kubelet does, and wait for its drain."""
    process.signal(signal.SIGTERM)
    assert process.wait(DRAIN_S) == 0, process.output

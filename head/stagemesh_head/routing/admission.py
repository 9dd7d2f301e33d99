"""Admission: how many requests of a pipeline may run, how many may wait, and a refusal at once beyond that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from stagemesh.rpc.errors import MeshError, Reason


class Admission:
    """Places of one pipeline. First come, first served."""

    def __init__(self, pipeline: str, *, max_running: int, max_waiting: int) -> None:
        self.pipeline = pipeline
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.running = 0
        self.refused = 0
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    def enter(self, admitted: Callable[[], None]) -> bool:
        """Take a place: True when there was one. Else `admitted` is called once one is free.

        Raises:
            MeshError: OVERLOADED with a delay, when the queue is full.
        """
        if self.running < self.max_running:
            self.running += 1
            return True
        if len(self._waiting) >= self.max_waiting:
            self.refused += 1
            raise MeshError(
                Reason.OVERLOADED,
                f"pipeline {self.pipeline!r}: {self.running} requests run and {len(self._waiting)} wait: try later",
                pipeline=self.pipeline,
                running=self.running,
                waiting=len(self._waiting),
            )
        self._waiting.append(admitted)
        return False

    def give_up(self, admitted: Callable[[], None]) -> None:
        """Wait no longer."""
        self._waiting.remove(admitted)

    def leave(self) -> None:
        """Give a place back; the first who waits gets it."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self.running -= 1
            if self.running < 0:
                raise RuntimeError(f"pipeline {self.pipeline!r}: more requests left than entered")

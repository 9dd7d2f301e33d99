"""Admission: how many requests of a pipeline and of one client may run and wait, and a refusal at once beyond that."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from stagemesh.rpc.errors import MeshError, Reason


class Place:
    """One request's place: it runs, or waits for its turn, until it leaves."""

    __slots__ = ("_admission", "admitted", "client", "has_turn")

    def __init__(self, admission: Admission, admitted: Callable[[], None], client: str, *, has_turn: bool) -> None:
        self._admission = admission
        self.admitted = admitted
        self.client = client
        self.has_turn = has_turn
        """It may run; else `admitted` is called once it may."""

    def leave(self) -> None:
        """Give it back, once; the first who waits gets it."""
        self._admission.left(self)


class Admission:
    """Places of one pipeline. First come, first served."""

    def __init__(
        self, pipeline: str, *, max_running: int, max_waiting: int, max_per_client: int | None = None
    ) -> None:
        """Args: max_per_client: requests of one client that run and wait; None: no bound of its own."""
        self.pipeline = pipeline
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.max_per_client = max_per_client
        self.running = 0
        self.refused = 0
        self._waiting: deque[Place] = deque()
        self._of_client: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    def enter(self, admitted: Callable[[], None], client: str = "") -> Place:
        """Take a place. When there is none now, `admitted` is called once one is free.

        Args:
            client: who asks; empty for one who cannot be told from others, whom no bound of its own holds.

        Raises:
            MeshError: OVERLOADED with a delay, when the queue is full, or the client has all that one may have.
        """
        held = self._of_client[client] if client else 0
        if self.max_per_client is not None and held >= self.max_per_client:
            self.refused += 1
            raise MeshError(
                Reason.OVERLOADED,
                f"pipeline {self.pipeline!r}: {held} requests of this client run or wait, as many as one may have: "
                "try later",
                pipeline=self.pipeline,
                limit=self.max_per_client,
            )
        has_turn = self.running < self.max_running
        if not has_turn and len(self._waiting) >= self.max_waiting:
            self.refused += 1
            raise MeshError(
                Reason.OVERLOADED,
                f"pipeline {self.pipeline!r}: {self.running} requests run and {len(self._waiting)} wait: try later",
                pipeline=self.pipeline,
                running=self.running,
                waiting=len(self._waiting),
            )
        place = Place(self, admitted, client, has_turn=has_turn)
        if has_turn:
            self.running += 1
        else:
            self._waiting.append(place)
        if client:
            self._of_client[client] += 1
        return place

    def left(self, place: Place) -> None:
        """A place was given back."""
        if place.client:
            self._of_client[place.client] -= 1
            if not self._of_client[place.client]:
                del self._of_client[place.client]
        if not place.has_turn:
            self._waiting.remove(place)
        elif self._waiting:
            following = self._waiting.popleft()
            following.has_turn = True
            following.admitted()
        else:
            self.running -= 1
            if self.running < 0:
                raise RuntimeError(f"pipeline {self.pipeline!r}: more requests left than entered")

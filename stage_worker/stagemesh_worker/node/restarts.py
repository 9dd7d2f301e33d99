"""When a replica that ended is started again (pure)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class RestartPolicy:
    """Exponential backoff with jitter, and an end to a crash loop."""

    first_delay_s: float = 0.2
    max_delay_s: float = 30.0
    max_crashes: int = 5
    """Crashes within `window_s` after which it is given up."""
    window_s: float = 300.0
    max_failed_starts: int = 3
    """Starts in a row that never served after which it is given up: each may take minutes, so no window counts them."""
    healthy_after_s: float = 60.0
    """A replica that served for so long begins anew with the first delay."""
    jitter: Callable[[], float] = random.random
    _crashes: deque[float] = field(default_factory=deque)
    _streak: int = 0
    _failed_starts: int = 0

    def crashed(self, now: float, served_s: float | None) -> float | None:
        """Note an end at `now` (monotonic seconds) after `served_s` seconds of serving; None: it never served.

        Returns:
            Seconds to wait before the next start, or None when there is to be none; `verdict` says why.
        """
        while self._crashes and self._crashes[0] <= now - self.window_s:
            self._crashes.popleft()
        self._crashes.append(now)
        self._failed_starts = self._failed_starts + 1 if served_s is None else 0
        if self.verdict:
            return None
        self._streak = 0 if served_s is not None and served_s >= self.healthy_after_s else self._streak + 1
        ceiling = min(self.max_delay_s, self.first_delay_s * 2.0 ** max(0, self._streak - 1))
        return ceiling * (0.5 + 0.5 * self.jitter())

    @property
    def verdict(self) -> str:
        """Why it is not to be started again; empty while it is."""
        if len(self._crashes) >= self.max_crashes:
            return f"it ended {self.max_crashes} times within {self.window_s:.0f} s"
        if self._failed_starts >= self.max_failed_starts:
            return f"{self.max_failed_starts} starts in a row failed"
        return ""

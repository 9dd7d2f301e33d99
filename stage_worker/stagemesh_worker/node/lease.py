"""When to renew a lease, and when a session that says nothing is given up (pure).

Renewals are planned from the lease's expiry and not from the last answer, so that slow answers cannot make them slip
past it; after each failure the wait is half of what remains.
"""

from __future__ import annotations

SILENT_SHARE = 0.5
"""A session without an answer for that share of the lease is taken for dead: the other half is for joining again."""
MIN_RETRY_S = 0.05


class Lease:
    """The node's view of its lease. Times are monotonic seconds.

    The head may count from a later moment, that of the renewal's arrival, so this view errs to the safe side.
    """

    def __init__(self, interval_s: float, lease_s: float, now: float) -> None:
        """
        Args:
            interval_s: between two renewals, as the head wishes.
            lease_s: how long the head keeps a node that renews nothing.
            now: when Hello was sent.
        """
        self.interval_s = interval_s
        self.lease_s = lease_s
        self.expires_at = now + lease_s
        self._sent_at = now
        self._unanswered: dict[int, float] = {}
        """Sequence -> when it was sent."""

    def sent(self, sequence: int, now: float) -> None:
        """A renewal went out."""
        self._sent_at = now
        self._unanswered[sequence] = now

    def answered(self, sequence: int) -> None:
        """The head has taken renewal `sequence`, hence all before it."""
        sent_at = self._unanswered.get(sequence)
        if sent_at is None:
            return
        self.expires_at = max(self.expires_at, sent_at + self.lease_s)
        self._unanswered = {number: at for number, at in self._unanswered.items() if number > sequence}

    def due_at(self) -> float:
        """When the next renewal is to go out."""
        if not self._unanswered:
            return self.expires_at - self.lease_s + self.interval_s
        return self._sent_at + min(self.interval_s, max(MIN_RETRY_S, (self.expires_at - self._sent_at) / 2))

    def is_silent(self, now: float) -> bool:
        """Whether the head has not answered for too long."""
        return bool(self._unanswered) and now >= self.expires_at - self.lease_s * (1 - SILENT_SHARE)

    def retry_within_s(self, now: float) -> float | None:
        """Longest pause before the next try to join, while the lease can still be saved; None once it cannot."""
        remaining = self.expires_at - now
        return max(MIN_RETRY_S, remaining / 2) if remaining > MIN_RETRY_S else None

"""Renewals are planned from the lease's expiry."""

from __future__ import annotations

import pytest

from stagemesh_worker.node.lease import Lease


def test_answered_renewals_come_at_the_interval_however_slow_the_answers() -> None:
    lease, now = Lease(1.0, 10.0, 0.0), 0.0
    for sequence in range(1, 6):
        now = lease.due_at()
        assert now == pytest.approx(float(sequence)), "the answer's time does not count"
        lease.sent(sequence, now)
        lease.answered(sequence)
        assert lease.expires_at == pytest.approx(now + 10.0)


def test_after_each_failure_half_of_what_remains_is_waited() -> None:
    lease = Lease(5.0, 6.0, 0.0)
    lease.sent(1, 5.0)
    assert lease.due_at() == pytest.approx(5.5)
    lease.sent(2, 5.5)
    assert lease.due_at() == pytest.approx(5.75)


def test_an_answer_renews_from_when_its_heartbeat_was_sent() -> None:
    lease = Lease(1.0, 10.0, 0.0)
    lease.sent(1, 1.0)
    lease.sent(2, 2.0)
    lease.answered(1)
    assert lease.expires_at == pytest.approx(11.0)
    lease.answered(2)
    assert lease.expires_at == pytest.approx(12.0)
    lease.answered(1)
    assert lease.expires_at == pytest.approx(12.0), "a late answer takes nothing back"


def test_a_head_that_answers_nothing_for_half_the_lease_is_silent() -> None:
    lease = Lease(1.0, 10.0, 0.0)
    assert not lease.is_silent(100.0), "nothing was asked"
    lease.sent(1, 1.0)
    assert not lease.is_silent(4.9)
    assert lease.is_silent(5.0)
    lease.answered(1)
    assert not lease.is_silent(5.0)


def test_tries_to_join_again_halve_what_remains_of_the_lease() -> None:
    lease = Lease(1.0, 10.0, 0.0)
    assert lease.retry_within_s(6.0) == pytest.approx(2.0)
    assert lease.retry_within_s(8.0) == pytest.approx(1.0)
    assert lease.retry_within_s(9.99) is None
    assert lease.retry_within_s(50.0) is None

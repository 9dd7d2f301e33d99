"""When a replica is started again, and when no more."""

from __future__ import annotations

import pytest

from stagemesh_worker.node.restarts import RestartPolicy


def test_pauses_double_up_to_the_longest() -> None:
    policy = RestartPolicy(first_delay_s=1.0, max_delay_s=4.0, max_crashes=99, jitter=lambda: 1.0)
    assert [policy.crashed(float(i), 5.0) for i in range(5)] == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_pauses_are_jittered_down_to_half() -> None:
    policy = RestartPolicy(first_delay_s=1.0, jitter=lambda: 0.0)
    assert policy.crashed(0.0, 5.0) == pytest.approx(0.5)


def test_one_that_served_long_begins_with_the_shortest_pause() -> None:
    policy = RestartPolicy(first_delay_s=1.0, max_crashes=99, jitter=lambda: 1.0)
    policy.crashed(0.0, 1.0)
    policy.crashed(1.0, 1.0)
    assert policy.crashed(100.0, 60.0) == 1.0


def test_five_ends_within_five_minutes_are_a_crash_loop() -> None:
    policy = RestartPolicy()
    assert all(policy.crashed(now, 10.0) is not None for now in (0.0, 50.0, 100.0, 150.0))
    assert policy.crashed(299.0, 10.0) is None
    assert policy.verdict == "it ended 5 times within 300 s"


def test_ends_further_apart_are_none() -> None:
    policy = RestartPolicy()
    assert all(policy.crashed(100.0 * i, 90.0) is not None for i in range(50))


def test_three_starts_in_a_row_that_never_served_are_enough_however_long_each_took() -> None:
    policy = RestartPolicy()
    assert policy.crashed(0.0, None) is not None
    assert policy.crashed(1000.0, None) is not None
    assert policy.crashed(2000.0, None) is None
    assert policy.verdict == "3 starts in a row failed"


def test_a_start_that_served_breaks_the_row() -> None:
    policy = RestartPolicy()
    for now in (0.0, 1000.0):
        policy.crashed(now, None)
    assert policy.crashed(2000.0, 5.0) is not None
    assert policy.crashed(3000.0, None) is not None

"""Backoff: full jitter below an exponential, capped ceiling."""

from __future__ import annotations

import pytest

from stagemesh.rpc.backoff import Backoff


def highest(low: float, high: float) -> float:
    return high


def test_the_ceiling_doubles_up_to_its_cap_and_begins_anew_after_a_success() -> None:
    backoff = Backoff(0.1, 1.0, uniform=highest)
    assert [backoff.next_s() for _ in range(5)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0])
    backoff.reset()
    assert backoff.next_s() == pytest.approx(0.1)


def test_pauses_are_spread_over_the_whole_range() -> None:
    pauses = [Backoff(1.0, 1.0).next_s() for _ in range(400)]
    assert all(0.02 <= pause <= 1.0 for pause in pauses)
    assert min(pauses) < 0.2
    assert max(pauses) > 0.8


def test_a_caller_that_fails_for_days_does_not_overflow() -> None:
    backoff = Backoff(0.1, 5.0, uniform=highest)
    for _ in range(5000):
        assert backoff.next_s() <= 5.0


@pytest.mark.parametrize(("base", "cap", "floor"), [(0.0, 1.0, 0.02), (2.0, 1.0, 0.02), (0.1, 1.0, 0.5)])
def test_a_range_that_makes_no_sense_is_refused(base: float, cap: float, floor: float) -> None:
    with pytest.raises(ValueError, match="want 0 < floor <= base <= cap"):
        Backoff(base, cap, floor_s=floor)

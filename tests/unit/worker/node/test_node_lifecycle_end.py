"""The end of a replica's life: a revocation drains it, stops it, kills it, and releases its devices."""

from __future__ import annotations

import pytest
from replica_lives import DRAINING, GONE, LIMITS, new_life, serving, started

from stagemesh_worker.node.lifecycle import Step
from stagemesh_worker.node.orders import Kill, Release, Tell, Terminate
from stagemesh_worker.node.reports import report_of
from stagemesh_worker.replica import control


def test_revoked_while_serving_it_drains_stops_and_is_gone() -> None:
    life = serving()
    assert life.revoke(30.0, 1.0) == [Tell(control.Drain(30.0))]
    assert life.state == DRAINING
    assert life.heard(control.Drained(), 2.0) == [Tell(control.Stop())]
    assert life.ended(0, [], 3.0) == [Release()]
    report = report_of(life)
    assert (report.state, report.endpoint) == (GONE, "")


def test_a_drain_that_takes_too_long_becomes_a_stop_and_then_a_kill() -> None:
    life = serving()
    life.revoke(30.0, 0.0)
    assert life.tick(30.5) == []
    assert life.tick(31.0) == [Tell(control.Stop())]
    assert life.tick(31.0 + LIMITS.stop_s) == [Kill()]
    assert life.ended(-9, [], 42.0) == [Release()]
    assert life.state == GONE


def test_a_second_revocation_shortens_a_drain_and_never_lengthens_it() -> None:
    life = serving()
    life.revoke(30.0, 0.0)
    assert life.revoke(500.0, 1.0) == []
    assert life.revoke(3.0, 1.0) == []
    assert life.tick(5.0) == [Tell(control.Stop())]


def test_revoked_while_loading_it_is_stopped_at_once() -> None:
    life = started()
    assert life.revoke(30.0, 1.0) == [Tell(control.Stop()), Terminate()]
    life.heard(control.Ready("10.0.0.5:4000"), 1.1)
    assert life.state == DRAINING, "what crosses the order does not revive it"
    assert life.ended(-15, [], 1.2) == [Release()]


@pytest.mark.parametrize("step", [Step.LOCKING, Step.PAUSING, Step.FAILED])
def test_revoked_while_nothing_runs_it_is_gone_at_once(step: Step) -> None:
    life = new_life()
    life.begin()
    if step is Step.PAUSING:
        life.locked(0.0)
        life.spawn_failed("no", 0.0)
    elif step is Step.FAILED:
        life.lock_failed("no")
    assert life.step is step
    assert life.revoke(30.0, 1.0) == [Release()]
    assert life.state == GONE


def test_in_a_hurry_a_drain_is_cut_short() -> None:
    life = serving()
    life.revoke(30.0, 0.0)
    assert life.hurry(1.0) == [Tell(control.Stop())]
    assert life.tick(1.0 + LIMITS.hurry_s) == [Kill()]


def test_a_process_that_dies_while_it_drains_is_not_started_again() -> None:
    life = serving()
    life.revoke(30.0, 0.0)
    assert life.ended(-9, [], 1.0) == [Release()]
    assert life.state == GONE

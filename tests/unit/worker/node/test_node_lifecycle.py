"""The life of a replica, without processes: what it asks for and what it reports."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from replica_lives import (
    FAILED,
    LIMITS,
    READY,
    STAGE,
    STARTING,
    SUSPECT,
    first_line,
    kinds,
    new_life,
    serving,
    started,
)

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh_worker.node.lifecycle import Step
from stagemesh_worker.node.orders import Kill, Lock, Order, Release, Spawn
from stagemesh_worker.node.reports import report_of
from stagemesh_worker.replica import control


def test_from_assignment_to_ready() -> None:
    life = new_life()
    assert life.begin() == [Lock(100.0)]
    life.lock_waits("cpu:1, which process 9 has")
    assert (life.state, life.phase) == (STARTING, "waiting for cpu:1, which process 9 has")
    [spawn] = life.locked(1.0)
    assert isinstance(spawn, Spawn)
    assign = spawn.assign
    assert (assign.stage, assign.replica_id, assign.incarnation) == (STAGE, 1, "i1")
    assert assign.devices == (control.AssignedDevice("cpu:1", (1,), ""),)
    assert (assign.listen_host, assign.advertise_host, assign.host_id) == ("127.0.0.1", "10.0.0.5", "host")
    assert assign.progress_timeout_s == 20.0
    life.spawned(77, 1.0)
    life.heard(control.Phase("loading weights"), 2.0)
    report = report_of(life)
    assert (report.state, report.phase, report.pid, report.endpoint) == (STARTING, "loading weights", 77, "")
    life.heard(control.Ready("10.0.0.5:4000"), 3.0)
    life.heard(control.Load(running=2, waiting=1, engine_steps=9, since_progress_s=0.25), 3.5)
    report = report_of(life)
    assert (report.state, report.endpoint, report.replica.incarnation) == (READY, "10.0.0.5:4000", "i1")
    assert (report.pipeline_revision, list(report.device_ids)) == ("r1", ["cpu:1"])
    assert (report.load.running, report.load.engine_steps) == (2, 9)
    assert report.load.since_progress.ToMilliseconds() == 250
    assert not report.HasField("error")


def test_devices_that_stay_taken_fail_the_replica_and_are_released() -> None:
    life = new_life()
    life.begin()
    assert kinds(life.lock_failed("waited 100 s for cpu:1, which process 9 has")) == [Release]
    assert life.state == FAILED
    assert "process 9" in first_line(life)


def test_where_the_lock_folder_cannot_be_used_it_is_failed_and_tries_again_until_it_can() -> None:
    life = new_life()
    life.begin()
    text = "its devices cannot be locked: /locks/core-1.lock: No space left on device"
    assert kinds(life.lock_folder_failed(text, 0.0)) == [Release]
    assert (life.state, first_line(life)) == (FAILED, text), "at once, so that the head may move it"
    assert life.tick(1.9) == []
    assert kinds(life.tick(2.0)) == [Lock]
    assert life.state == FAILED, "a try is no news"
    assert life.tick(9.0) == [], "one at a time"
    assert kinds(life.lock_folder_failed(text, 9.0)) == [Release]
    assert kinds(life.tick(11.0)) == [Lock]
    assert kinds(life.locked(11.1)) == [Spawn]
    life.spawned(77, 11.1)
    assert life.state == STARTING
    life.heard(control.Ready("h:1"), 12.0)
    assert life.state == READY


def test_devices_that_another_has_after_all_end_the_tries() -> None:
    life = new_life()
    life.begin()
    life.lock_folder_failed("disk full", 0.0)
    life.tick(2.0)
    assert kinds(life.lock_failed("waited 100 s for cpu:1, which process 9 has")) == [Release]
    assert life.tick(1000.0) == []
    assert life.state == FAILED


def test_a_crash_starts_it_again_with_a_new_incarnation_and_the_reason() -> None:
    life = serving()
    life.heard(control.Load(running=1), 1.0)
    assert life.ended(-9, ["loading", "boom"], 2.0) == []
    report = report_of(life)
    assert (report.state, report.replica.incarnation, report.restarts) == (STARTING, "i2", 1)
    assert (report.endpoint, report.pid) == ("", 0)
    assert not report.HasField("load")
    error = MeshError.from_status(report.error)
    assert error.reason is Reason.REPLICA_LOST
    assert error.message.splitlines() == [
        "the replica process was killed by SIGKILL (out of memory, perhaps)", "loading", "boom"
    ]  # fmt: skip
    assert life.tick(2.1) == [], "it pauses first"
    assert kinds(life.tick(2.3)) == [Spawn]
    life.spawned(78, 2.3)
    life.heard(control.Ready("10.0.0.5:4001"), 3.0)
    assert life.error is None, "what is over is not reported any more"


def test_a_wrong_configuration_is_given_up_at_once() -> None:
    life = started()
    life.heard(control.Failed("BAD_STAGE_CONFIG", "engine_args.max_len: unknown", fatal=True), 1.0)
    assert kinds(life.ended(3, ["some line"], 1.1)) == [Release]
    report = report_of(life)
    assert (report.state, report.restarts) == (FAILED, 0)
    assert MeshError.from_status(report.error).reason is Reason.BAD_STAGE_CONFIG
    assert report.error.message.splitlines() == ["engine_args.max_len: unknown", "some line"]


def test_starts_that_fail_in_a_row_are_given_up_with_the_engines_last_lines() -> None:
    life, now = started(), 0.0
    for _ in range(2):
        life.heard(control.Failed("START_FAILED", "no weights"), now)
        assert life.ended(3, [], now) == []
        now += 10
        assert kinds(life.tick(now)) == [Spawn]
        life.spawned(80, now)
    life.heard(control.Failed("START_FAILED", "no weights"), now)
    assert kinds(life.ended(3, ["OSError: no file"], now)) == [Release]
    assert life.state == FAILED
    assert life.error is not None
    assert life.error.message.splitlines() == ["no weights (3 starts in a row failed)", "OSError: no file"]


def test_a_process_that_cannot_be_spawned_counts_as_a_failed_start() -> None:
    life = new_life()
    life.begin()
    life.locked(0.0)
    assert life.spawn_failed("Resource temporarily unavailable", 0.0) == []
    assert life.step is Step.PAUSING
    assert "cannot be started: Resource temporarily unavailable" in first_line(life)


def test_a_start_that_takes_too_long_is_killed_and_says_where_it_stood() -> None:
    life = started()
    life.heard(control.Phase("loading weights"), 5.0)
    assert life.tick(99.0) == []
    assert life.tick(100.0) == [Kill()]
    life.ended(-9, [], 100.1)
    assert "not ready after 100 s; the last that it did: loading weights" in first_line(life)


def test_a_silent_process_is_suspect_and_heals_when_it_speaks() -> None:
    life = serving(0.0)
    life.tick(4.9)
    assert life.state == READY
    life.tick(5.0)
    assert life.state == SUSPECT
    assert "has not answered for 5 s" in first_line(life)
    life.heard(control.Load(), 6.0)
    assert life.state == READY
    assert life.incarnation == "i1"


def test_a_process_that_stays_silent_is_killed_and_started_again() -> None:
    life = serving(0.0)
    assert life.tick(19.0) == []
    assert life.tick(20.0) == [Kill()]
    assert life.state == SUSPECT
    life.ended(-9, [], 20.2)
    assert (life.state, life.incarnation) == (STARTING, "i2")
    assert "said nothing for 20 s" in first_line(life)


def test_a_node_agent_that_stood_still_itself_blames_no_replica() -> None:
    life = serving(0.0)
    life.stalled(30.0)
    assert life.tick(30.2) == []
    assert life.state == READY


def test_an_engine_that_says_it_is_stuck_is_suspect_until_it_moves() -> None:
    life = serving()
    life.heard(control.Unhealthy("no step for 60 s with 3 tasks"), 1.0)
    assert life.state == SUSPECT
    assert first_line(life) == "no step for 60 s with 3 tasks"
    life.heard(control.Load(), 1.5)
    assert life.state == SUSPECT, "a load report is no progress"
    life.heard(control.Healthy(), 2.0)
    assert life.state == READY


def test_a_process_that_says_it_failed_and_stays_is_killed() -> None:
    life = serving()
    life.heard(control.Failed("ENGINE_DEAD", "the engine core died"), 1.0)
    assert life.state == SUSPECT
    assert life.tick(1.0 + LIMITS.exit_s - 0.1) == []
    assert life.tick(1.0 + LIMITS.exit_s) == [Kill()]
    life.ended(-9, [], 17.0)
    assert first_line(life) == "the engine core died", "its own word says more than its exit"


EVENTS = st.one_of(
    st.tuples(st.just("tick"), st.floats(0.0, 50.0)),
    st.tuples(
        st.just("hear"),
        st.sampled_from(
            [
                control.Phase("loading"),
                control.Ready("h:1"),
                control.Load(running=1),
                control.Unhealthy("stuck"),
                control.Healthy(),
                control.Drained(),
                control.Failed("ENGINE_DEAD", "died"),
                control.Failed("BAD_STAGE_CONFIG", "wrong", fatal=True),
            ]
        ),
    ),
    st.tuples(st.just("end"), st.sampled_from([0, 3, -9])),
    st.tuples(st.just("revoke"), st.sampled_from([0.0, 5.0])),
    st.tuples(st.just("hurry"), st.none()),
    st.tuples(st.just("lock"), st.sampled_from(["got", "taken", "full"])),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.booleans())
def test_whatever_happens_there_is_one_process_and_an_end(events: list[tuple[str, object]], spawns: bool) -> None:
    """One process at a time, each start its own incarnation, devices released once, and no life after the end."""
    life, now = new_life(), 0.0
    runs, spawned, released, is_locked, locking = False, [], 0, False, False

    def follow(orders: Sequence[Order]) -> None:
        nonlocal runs, released, is_locked, locking
        for order in orders:
            if isinstance(order, Lock):
                assert not locking and not is_locked, "devices wanted twice"
                locking = True
            elif isinstance(order, Spawn):
                assert not runs, "a second process in one slot"
                assert is_locked, "a process without its devices"
                assert order.assign.incarnation == life.incarnation
                spawned.append(order.assign.incarnation)
                if spawns:
                    runs = True
                    life.spawned(100 + len(spawned), now)
                else:
                    follow(life.spawn_failed("no more processes", now))
            elif isinstance(order, Release):
                assert not runs, "devices released under a running process"
                released += 1
                locking = is_locked = False

    follow(life.begin())
    tries = False
    """FAILED is not its end: it tries for its devices again."""
    for kind, value in events:
        over = life.step is Step.GONE or (life.step is Step.FAILED and not tries)
        before = life.step
        if kind == "tick":
            now += value  # type: ignore[operator]
            follow(life.tick(now))
        elif kind == "hear" and runs:
            follow(life.heard(value, now))  # type: ignore[arg-type]
        elif kind == "end" and runs:
            runs = False
            follow(life.ended(value, ["a line"], now))  # type: ignore[arg-type]
        elif kind == "revoke":
            follow(life.revoke(value, now))  # type: ignore[arg-type]
        elif kind == "hurry":
            follow(life.hurry(now))
        elif kind == "lock" and locking:
            locking, is_locked, tries = False, value == "got", value == "full"
            match value:
                case "got":
                    follow(life.locked(now))
                case "taken":
                    follow(life.lock_failed("taken"))
                case "full":
                    follow(life.lock_folder_failed("disk full", now))
        if over:
            assert life.step in (before, Step.GONE)
        report = report_of(life)
        assert report.state != READY or report.endpoint
        assert report.state != FAILED or report.error.message
        assert report.replica.incarnation
    assert len(set(spawned)) == len(spawned)

    follow(life.revoke(5.0, now))
    for _ in range(6):
        now += 20.0
        killed = Kill() in (orders := life.tick(now))
        follow(orders)
        if killed and runs:
            runs = False
            follow(life.ended(-9, [], now))
    assert life.step is Step.GONE, f"it never ended: {life.step}"
    assert released >= 1

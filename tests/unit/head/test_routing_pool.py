from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_head.registry.rows import ReplicaKey, ReplicaRow, ReplicaState
from stagemesh_head.routing.admission import Admission
from stagemesh_head.routing.policies import RouteHint
from stagemesh_head.routing.pool import Binding, StagePool
from stagemesh_head.routing.registry import make_policy

HINT = RouteHint()


class FakeLink:
    def __init__(self, session: int = 1, is_up: bool = True) -> None:
        self.session = session
        self.is_up = is_up
        self.reported: int | None = None


def row(replica_id: int, state: ReplicaState = ReplicaState.READY, incarnation: str = "a", load: int = 0) -> ReplicaRow:
    key = ReplicaKey("p", "s", replica_id)
    return ReplicaRow(key, incarnation, "n", state, "127.0.0.1:1", load=replica_pb.ReplicaLoad(running=load))


def pool_of(*ids: int, policy: str = "least-queue-length", max_waiting: int = 8) -> StagePool:
    pool = StagePool("p", "s", make_policy(policy), max_waiting=max_waiting)
    for replica_id in ids:
        pool.update(replica_id, row(replica_id), FakeLink())
    return pool


def test_pick_reserves_in_the_same_step() -> None:
    pool = pool_of(0, 1)
    picked = [pool.pick(HINT).replica_id for _ in range(6)]
    assert sorted(picked) == [0, 0, 0, 1, 1, 1]
    assert pool.inflight == 6


def test_what_a_replica_says_on_its_link_is_newer_than_what_its_node_said() -> None:
    pool = pool_of(0, 1)
    links = [FakeLink(), FakeLink()]
    pool.update(0, row(0, load=1), links[0])
    pool.update(1, row(1, load=2), links[1])
    with_rows = pool.pick(HINT)
    assert with_rows.replica_id == 0
    with_rows.release()
    links[0].reported = 5
    assert pool.pick(HINT).replica_id == 1


def test_R2_release_gives_the_place_back_once() -> None:
    pool = pool_of(0)
    binding = pool.pick(HINT)
    binding.release()
    assert pool.inflight == 0
    with pytest.raises(RuntimeError, match="released twice"):
        binding.release()
    assert pool.inflight == 0


@pytest.mark.parametrize(
    "state", [s for s in ReplicaState if s is not ReplicaState.READY], ids=lambda state: state.name.lower()
)
def test_only_ready_replicas_are_picked(state: ReplicaState) -> None:
    pool = pool_of(0)
    pool.update(0, row(0, state), FakeLink())
    assert pool.pick(HINT) is None


def test_a_ready_replica_without_a_link_is_not_picked() -> None:
    pool = pool_of(0)
    pool.update(0, row(0), FakeLink(is_up=False))
    assert pool.pick(HINT) is None
    pool.update(0, row(0), None)
    assert pool.pick(HINT) is None


def test_retry_excludes_what_was_tried() -> None:
    pool = pool_of(0, 1)
    first = pool.pick(HINT)
    assert {pool.pick(HINT, [first.identity]).replica_id for _ in range(5)} == {1 - first.replica_id}


def test_retry_takes_a_replica_again_only_after_its_link_opened_anew_and_last() -> None:
    pool = pool_of(0)
    lost = pool.pick(HINT).identity
    assert pool.pick(HINT, [lost]) is None
    pool.update(0, row(0), FakeLink(session=2))
    assert pool.pick(HINT, [lost]).replica_id == 0
    pool.update(1, row(1), FakeLink())
    assert {pool.pick(HINT, [lost]).replica_id for _ in range(4)} == {1}


def test_a_restarted_replica_starts_with_no_tasks_in_flight() -> None:
    pool = pool_of(0)
    old = [pool.pick(HINT) for _ in range(3)]
    pool.update(0, row(0, incarnation="b"), FakeLink())
    assert pool.inflight == 0
    new = pool.pick(HINT)
    for binding in old:
        binding.release()
    assert pool.inflight == 1
    new.release()
    assert pool.inflight == 0


def test_waiters_are_served_in_order_when_a_replica_becomes_ready() -> None:
    pool, served = pool_of(), []
    for name in "abc":
        pool.wait(HINT, (), lambda binding, name=name: served.append((name, binding.replica_id)))
    pool.update(4, row(4), FakeLink())
    assert served == [("a", 4), ("b", 4), ("c", 4)]
    assert pool.waiting == 0


def test_a_waiter_that_left_is_not_served() -> None:
    pool, served = pool_of(), []
    ticket = pool.wait(HINT, (), served.append)
    pool.leave(ticket)
    pool.update(0, row(0), FakeLink())
    assert served == []
    assert pool.inflight == 0


def test_a_waiter_that_excludes_the_new_replica_goes_on_waiting() -> None:
    pool, served = pool_of(0), []
    lost = pool.pick(HINT).identity
    pool.wait(HINT, [lost], served.append)
    pool.wait(HINT, (), served.append)
    pool.update(0, row(0), FakeLink())
    assert len(served) == 1
    assert pool.waiting == 1


def test_a_full_queue_refuses_at_once_with_a_delay() -> None:
    pool = pool_of(max_waiting=1)
    pool.wait(HINT, (), lambda binding: None)
    with pytest.raises(MeshError) as caught:
        pool.wait(HINT, (), lambda binding: None)
    assert caught.value.reason is Reason.OVERLOADED
    assert caught.value.retry_delay_s


def test_missing_says_what_state_the_replicas_are_in() -> None:
    pool = pool_of()
    assert "no node serves it" in pool.missing().message
    pool.update(0, row(0, ReplicaState.STARTING), None)
    pool.update(1, row(1), None)
    assert "replica 0 is starting" in pool.missing().message
    assert "replica 1 is ready, but this head has no link to it" in pool.missing().message


@given(
    st.lists(st.tuples(st.sampled_from(["pick", "release", "ready", "suspect", "restart", "gone"]), st.integers(0, 3)))
)
def test_R1_counters_are_exact_and_never_negative(steps: list[tuple[str, int]]) -> None:
    pool, held, incarnation = pool_of(0, 1, 2, 3), list[Binding](), 0
    for step, replica_id in steps:
        if step == "pick":
            binding = pool.pick(HINT)
            if binding is not None:
                held.append(binding)
        elif step == "release" and held:
            held.pop(replica_id % len(held)).release()
        elif step == "ready":
            pool.update(replica_id, row(replica_id), FakeLink())
        elif step == "suspect":
            pool.update(replica_id, row(replica_id, ReplicaState.SUSPECT), FakeLink())
        elif step == "restart":
            incarnation += 1
            pool.update(replica_id, row(replica_id, incarnation=f"i{incarnation}"), FakeLink())
        elif step == "gone":
            pool.update(replica_id, None, None)
        for member in pool.members():
            assert member.inflight == sum(1 for b in held if b._member is member)
            assert member.inflight >= 0


def test_admission_bounds_what_runs_and_what_waits() -> None:
    admission, admitted = Admission("p", max_running=1, max_waiting=1), []
    first, second = admission.enter(lambda: admitted.append("a")), admission.enter(lambda: admitted.append("b"))
    assert (first.has_turn, second.has_turn) == (True, False)
    with pytest.raises(MeshError) as caught:
        admission.enter(lambda: admitted.append("c"))
    assert caught.value.reason is Reason.OVERLOADED
    assert caught.value.retry_delay_s
    first.leave()
    assert admitted == ["b"] and second.has_turn
    assert (admission.running, admission.waiting, admission.refused) == (1, 0, 1)
    second.leave()
    assert admission.running == 0


def test_admission_gives_the_place_of_one_who_gave_up_to_the_next() -> None:
    admission, admitted = Admission("p", max_running=1, max_waiting=2), []
    first = admission.enter(lambda: None)
    second = admission.enter(lambda: admitted.append("b"))
    admission.enter(lambda: admitted.append("c"))
    second.leave()
    first.leave()
    assert admitted == ["c"]


def test_admission_bounds_each_client_by_itself_and_nobody_who_cannot_be_told_from_others() -> None:
    admission = Admission("p", max_running=2, max_waiting=9, max_per_client=2)
    running, waiting = admission.enter(lambda: None, "ann"), admission.enter(lambda: None, "bob")
    queued = admission.enter(lambda: None, "ann")
    assert not queued.has_turn
    with pytest.raises(MeshError, match="2 requests of this client run or wait") as caught:
        admission.enter(lambda: None, "ann")
    assert caught.value.reason is Reason.OVERLOADED and caught.value.retry_delay_s
    for _ in range(5):
        admission.enter(lambda: None)
    queued.leave()
    admission.enter(lambda: None, "ann").leave()
    running.leave()
    waiting.leave()
    assert admission.refused == 1

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh_head.routing.affinity import PrefixAffinity
from stagemesh_head.routing.policies import LeastQueueLength, PowerOfTwo, Random, RoundRobin, RouteHint
from stagemesh_head.routing.registry import BUILT_IN, make_policy

NO_HINT = RouteHint()


@dataclass
class Replica:
    replica_id: int
    inflight: int = 0
    reported: int = 0
    last_pick: int = 0


def replicas(*ids: int) -> list[Replica]:
    return [Replica(replica_id) for replica_id in ids]


def picks(policy, candidates, count: int) -> list[int]:
    return [policy.choose(candidates, NO_HINT).replica_id for _ in range(count)]


def test_round_robin_goes_round() -> None:
    assert picks(RoundRobin(), replicas(0, 1, 2), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_R1_round_robin_neither_skips_nor_repeats_when_a_replica_leaves() -> None:
    policy = RoundRobin()
    assert picks(policy, replicas(0, 1, 2, 3), 2) == [0, 1]
    # Replica 0 leaves: an index into the list would now repeat or skip one.
    assert picks(policy, replicas(1, 2, 3), 3) == [2, 3, 1]


def test_R1_round_robin_neither_skips_nor_repeats_when_a_replica_joins() -> None:
    policy = RoundRobin()
    assert picks(policy, replicas(1, 3), 1) == [1]
    assert picks(policy, replicas(0, 1, 2, 3), 4) == [2, 3, 0, 1]


@given(st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=1, max_size=30))
def test_round_robin_visits_all_others_before_it_repeats_one(memberships: list[set[int]]) -> None:
    policy, history = RoundRobin(), []
    for ids in memberships:
        chosen = policy.choose(replicas(*sorted(ids)), NO_HINT).replica_id
        if chosen in history:
            since = history[len(history) - history[::-1].index(chosen) :]
            passed = memberships[len(history) - len(since) : len(history)]
            always_there = set.intersection(ids, *passed) if passed else set(ids)
            assert always_there - {chosen} <= set(since)
        history.append(chosen)


def test_R1_least_queue_length_counts_what_the_head_itself_has_in_flight() -> None:
    busy, idle = Replica(0, inflight=2, reported=0), Replica(1, inflight=1, reported=50)
    assert LeastQueueLength().choose([busy, idle], NO_HINT) is idle


def test_least_queue_length_breaks_ties_by_reported_load_and_then_by_who_waited_longest() -> None:
    policy = LeastQueueLength()
    assert policy.choose([Replica(0, 1, 5), Replica(1, 1, 4)], NO_HINT).replica_id == 1
    assert policy.choose([Replica(0, 1, 4, last_pick=9), Replica(1, 1, 4, last_pick=3)], NO_HINT).replica_id == 1


def test_R1_random_uses_every_replica_evenly() -> None:
    counts = Counter(picks(Random(seed=7), replicas(0, 1, 2, 3), 4_000))
    assert all(800 < counts[replica_id] < 1_200 for replica_id in range(4))


def test_power_of_two_never_takes_the_most_loaded() -> None:
    candidates = [Replica(0, inflight=9), Replica(1, inflight=1), Replica(2, inflight=2)]
    assert 0 not in picks(PowerOfTwo(seed=7), candidates, 200)


def test_affinity_sends_a_session_to_one_replica() -> None:
    policy, candidates = PrefixAffinity(), replicas(0, 1, 2, 3)
    chosen = {policy.choose(candidates, RouteHint(session_id="s", prefix=b"%d" % n)).replica_id for n in range(50)}
    assert len(chosen) == 1


def test_affinity_moves_only_the_keys_of_the_replica_that_left() -> None:
    policy, hints = PrefixAffinity(), [RouteHint(prefix=b"p%d" % n) for n in range(200)]
    before = [policy.choose(replicas(0, 1, 2, 3), hint).replica_id for hint in hints]
    after = [policy.choose(replicas(0, 1, 3), hint).replica_id for hint in hints]
    assert all(a == b for a, b in zip(after, before, strict=True) if b != 2)
    assert set(before) == {0, 1, 2, 3}


def test_affinity_bounds_the_load_of_a_hot_prefix() -> None:
    policy, candidates = PrefixAffinity(), replicas(0, 1, 2, 3)
    for _ in range(400):
        policy.choose(candidates, RouteHint(prefix=b"the same for all")).inflight += 1
    assert max(candidate.inflight for candidate in candidates) <= 126


def test_affinity_without_a_key_takes_the_least_loaded() -> None:
    assert PrefixAffinity().choose([Replica(0, 3), Replica(1, 1)], NO_HINT).replica_id == 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_R1_policy_is_made_by_name(name: str) -> None:
    assert make_policy(name).choose(replicas(4), NO_HINT).replica_id == 4


def test_unknown_policy_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"routing\.policy: 'fastest': unknown; policies are .*least-queue-length"):
        make_policy("fastest")

"""The queue: nobody starves, nobody is lost, and only what fits together shares a call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stagemesh_worker.engines.diffusion.batching import BatchQueue

REQUESTS = st.lists(
    st.tuples(st.sampled_from([None, "a", "b"]), st.integers(1, 5), st.integers(-1, 1)), min_size=1, max_size=20
)


def queue(max_size: int = 4, wait_s: float = 0.01) -> BatchQueue[str]:
    return BatchQueue(max_size, wait_s)


def test_a_request_waits_for_others_only_so_long() -> None:
    batches = queue()
    assert batches.due(0.0) is None
    batches.add("one", key="a", size=1, priority=0, now=1.0)
    due = batches.due(1.004)
    assert due is not None
    assert abs(due - 0.006) < 1e-9
    assert batches.due(1.02) == 0.0


def test_a_full_batch_goes_at_once() -> None:
    batches = queue(max_size=2)
    batches.add("one", key="a", size=1, priority=0, now=1.0)
    batches.add("two", key="a", size=1, priority=0, now=1.0)
    assert batches.due(1.0) == 0.0
    assert batches.take() == ["one", "two"]


def test_where_nothing_is_shared_nobody_waits() -> None:
    alone = queue(max_size=1)
    alone.add("one", key="a", size=1, priority=0, now=1.0)
    assert alone.due(1.0) == 0.0
    special = queue()
    special.add("embeddings", key=None, size=1, priority=0, now=1.0)
    assert special.due(1.0) == 0.0


def test_others_pass_a_request_that_does_not_fit_but_it_is_next() -> None:
    batches = queue()
    for name, key in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b")):
        batches.add(name, key=key, size=1, priority=0, now=1.0)
    assert batches.take() == ["a1", "a2"]
    assert batches.take() == ["b1", "b2"]
    assert batches.take() == []


def test_a_lower_number_of_priority_goes_first() -> None:
    batches = queue()
    batches.add("later", key="a", size=1, priority=5, now=1.0)
    batches.add("sooner", key="b", size=1, priority=-5, now=2.0)
    assert batches.take() == ["sooner"]


def test_a_request_larger_than_a_batch_runs_alone() -> None:
    batches = queue(max_size=2)
    batches.add("huge", key="a", size=9, priority=0, now=1.0)
    batches.add("small", key="a", size=1, priority=0, now=1.0)
    assert batches.take() == ["huge"]
    assert batches.take() == ["small"]


def test_an_aborted_request_leaves_the_queue() -> None:
    batches = queue()
    first, second = "first request", "second request"
    batches.add(first, key="a", size=1, priority=0, now=1.0)
    batches.add(second, key="a", size=1, priority=0, now=1.0)
    assert batches.remove(first)
    assert not batches.remove(first)
    assert batches.drain() == [second]
    assert len(batches) == 0


@given(REQUESTS, st.integers(1, 6))
def test_every_request_is_taken_once_in_a_batch_that_fits(
    requests: list[tuple[str | None, int, int]], max_size: int
) -> None:
    batches: BatchQueue[int] = BatchQueue(max_size, 0.01)
    for number, (key, size, priority) in enumerate(requests):
        batches.add(number, key=key, size=size, priority=priority, now=float(number))
    taken: list[int] = []
    while batch := batches.take():
        first = min(set(range(len(requests))) - set(taken), key=lambda number: (requests[number][2], number))
        assert batch[0] == first  # the one whose turn it is is never passed over
        keys = {requests[number][0] for number in batch}
        assert len(keys) == 1
        assert len(batch) == 1 or (keys != {None} and sum(requests[number][1] for number in batch) <= max_size)
        taken.extend(batch)
    assert sorted(taken) == list(range(len(requests)))

"""The request's state machine under random interleavings of everything that can happen to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from request_world import GRAPHS, SAMPLING, World, check_end, machine_of

from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_head.orchestration import events as ev
from stagemesh_head.orchestration.edges import WINDOW_UNITS

CHOICES = st.lists(st.integers(0, 2**16 - 1), max_size=120)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("sampling", SAMPLING)
@settings(max_examples=40, deadline=None)
@given(choices=CHOICES, final_only=st.booleans(), exact_or_fail=st.booleans())
def test_R2_every_request_ends_once_and_leaves_nothing(
    graph: str, sampling: str, choices: list[int], final_only: bool, exact_or_fail: bool
) -> None:
    world = World(machine_of(graph, sampling, final_only=final_only, exact_or_fail=exact_or_fail))
    for choice in choices:
        world.random_step(choice)
    world.settle()
    check_end(world)


def test_the_random_walk_meets_what_it_should() -> None:
    """The walk above proves nothing when it never gets anywhere: count what it meets."""
    seen: dict[str, int] = {}
    for world in walks(800):
        world.settle()
        check_end(world)
        end = world.ends[0]
        kind = "error" if end.error is not None else "left" if end.finished is None else "ended"
        if end.finished is not None:
            kind = frame_pb.FinishReason.Name(end.finished.finish_reason)
        elif end.error is not None and "limits.companion_timeout" in end.error.message:
            kind = "late"
        seen[kind] = seen.get(kind, 0) + 1
        for task in world.machine.tasks.values():
            met = [task.recovery] if kind == "FINISH_REASON_COMPLETE" else []
            if task.companion is not None:
                met += [f"companion {kind}", "companion lost"] if task.attempt > 1 else [f"companion {kind}"]
            for what in filter(None, met):
                seen[what] = seen.get(what, 0) + 1
    expected = ["error", "left", "FINISH_REASON_COMPLETE", "FINISH_REASON_ABORT", "exact", "continued", "restarted"]
    expected += [f"companion {kind}" for kind in (*expected[:4], "lost", "late")]
    for kind in expected:
        assert seen.get(kind, 0) >= 3, (kind, seen)


def walks(count: int) -> Iterator[World]:
    import random

    source = random.Random(20)
    graphs, samplings = list(GRAPHS), list(SAMPLING)
    for _ in range(count):
        world = World(machine_of(source.choice(graphs), source.choice(samplings), final_only=source.random() < 0.3))
        for _ in range(source.randrange(80)):
            world.random_step(source.randrange(2**16))
        yield world


def test_nothing_is_ordered_for_a_request_that_never_started() -> None:
    machine = machine_of("chain", "exact")
    commands = machine.handle(ev.Stop(ev.StopCause.ASKED), 0.1)
    assert [type(command) for command in commands] == [ev.End]
    assert machine.is_quiet


def test_R4_the_last_stage_of_a_request_is_told_that_nobody_reads_it() -> None:
    machine = machine_of("chain", "exact")
    (bind,) = machine.handle(ev.Start(), 0.0)
    assert bind == ev.Bind("a", ())
    (submit,) = machine.handle(ev.Bound("a", replica_pb.ReplicaRef(), (0, "i", 1)), 0.1)
    assert isinstance(submit, ev.Submit)
    assert not submit.command.last_stage


def test_producers_of_a_stream_start_with_a_window_of_credit() -> None:
    world = World(machine_of("stream", "exact"))
    world.bind("a")
    assert world.credit["a"] == WINDOW_UNITS
    world.output("a", 1_000)
    assert world.credit["a"] == 0
    assert world.binding == {"b"}

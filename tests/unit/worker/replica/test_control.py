"""The lines between a node agent and a replica."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh_worker.replica import control

MESSAGES = [
    control.Assign(
        "shapes", "abc", {"name": "writer"}, 2, "inc", (control.AssignedDevice("cpu:1", (1, 3)),), host_id="h"
    ),
    control.Drain(3.5),
    control.Stop(),
    control.Phase("loading weights"),
    control.Ready("127.0.0.1:4000"),
    control.Load(1, 2, 0.5, 9, 0.25, 1 << 30),
    control.Unhealthy("stuck"),
    control.Healthy(),
    control.Failed("START_FAILED", "no such file", fatal=True),
    control.Drained(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_survives_the_wire(message: control.Message) -> None:
    line = control.encode(message)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert control.decode(line) == message


def test_unknown_keys_are_ignored_so_that_versions_may_differ() -> None:
    assert control.decode(b'{"type": "phase", "phase": "x", "later": 1}') == control.Phase("x")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"nonsense", "not JSON"),
        (b"[1]", "want one of assign"),
        (b'{"type": "explode"}', "'explode'"),
        (b'{"type": "phase"}', "phase"),
        (b'{"type": "assign", "devices": [{"cores": []}]}', "id"),
    ],
)
def test_bad_line_is_refused_with_its_reason(line: bytes, words: str) -> None:
    with pytest.raises(control.ControlError, match=words):
        control.decode(line)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_control_errors(line: bytes) -> None:
    try:
        control.decode(line)
    except control.ControlError:
        return


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(0, 9))
def test_lines_are_found_however_the_bytes_are_cut(cuts: list[int], first: int) -> None:
    stream = b"".join(control.encode(message) for message in MESSAGES[first:])
    buffer, found, at = control.LineBuffer(), [], 0
    for cut in [*cuts, len(stream)]:
        found += buffer.feed(stream[at : at + cut])
        at += cut
    assert [control.decode(line) for line in found] == MESSAGES[first:]


def test_endless_line_is_refused() -> None:
    buffer = control.LineBuffer()
    with pytest.raises(control.ControlError, match="longer than"):
        for _ in range(20):
            buffer.feed(b"x" * (1 << 20))

"""What is said of a replica that ended."""

from __future__ import annotations

import pytest

from stagemesh.rpc.errors import MAX_MESSAGE_CHARS, MeshError, Reason
from stagemesh_worker.node import failures
from stagemesh_worker.replica import control


def test_the_last_lines_are_kept_when_there_is_not_room_for_all() -> None:
    lines = [f"line {number} {'x' * 200}" for number in range(50)]
    error = failures.with_lines(MeshError(Reason.START_FAILED, "it failed"), lines)
    first, *shown = error.message.splitlines()
    assert first == "it failed"
    assert shown == lines[-len(shown) :]
    assert 5 <= len(shown) <= 9
    assert len(error.message) <= MAX_MESSAGE_CHARS
    assert MeshError.from_status(error.to_status()).message == error.message


def test_a_long_first_text_leaves_room_for_lines() -> None:
    error = failures.with_lines(MeshError(Reason.START_FAILED, "y" * 5000), ["the cause"])
    assert error.message.endswith("...\nthe cause")


def test_blank_lines_are_left_out_and_order_is_kept() -> None:
    error = failures.with_lines(MeshError(Reason.START_FAILED, "it\nfailed"), ["a", "", "  ", "b"], "given up")
    assert error.message.splitlines() == ["it failed (given up)", "a", "b"]


ROOT = "ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)])."
OWN = "RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize("root", [ROOT, f"(EngineCore pid=8311) ERROR 12-02 15:08:33 [core.py:1510] {ROOT}"])
def test_the_exception_behind_the_last_one_is_named_though_it_is_far_above(root: str) -> None:
    lines = ["OSError: an older one", root, *(f"  frame {number}" for number in range(60)), OWN, f"ERROR    {OWN}"]
    error = failures.with_lines(MeshError(Reason.START_FAILED, OWN), lines)
    first, cause, *rest = error.message.splitlines()
    assert (first, cause) == (OWN, ROOT)
    assert rest == lines[-failures.MAX_LINES :]


def test_an_exception_among_the_last_lines_is_not_told_twice() -> None:
    error = failures.with_lines(MeshError(Reason.START_FAILED, OWN), ["a", ROOT, OWN])
    assert error.message.splitlines() == [OWN, "a", ROOT, OWN]


def test_a_word_of_an_unknown_reason_is_a_failed_start() -> None:
    assert failures.reported(control.Failed("NEW_REASON", "hm")).reason is Reason.START_FAILED
    assert failures.reported(control.Failed("ENGINE_DEAD", "hm")).reason is Reason.ENGINE_DEAD


def test_an_unannounced_end_names_signal_or_status() -> None:
    assert failures.unannounced(-11, has_served=True).message == "the replica process was killed by SIGSEGV"
    assert failures.unannounced(7, has_served=True).reason is Reason.REPLICA_LOST
    assert failures.unannounced(7, has_served=False).reason is Reason.START_FAILED
    assert "out of memory" in failures.unannounced(-9, has_served=True).message

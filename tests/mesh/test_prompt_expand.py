"""What the operator's `prompt_expand` function may do, and what it cannot: its mistakes are one request's."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagemesh.rpc.errors import Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh_head.orchestration import expansion
from tests.mesh import expansions
from tests.mesh.harness import cluster, eventually
from tests.mesh.test_abort import ABORTED, abort
from tests.mesh.test_companions import HERE, family, stages


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("raises", "LookupError: no words for it"),
        ("time limit", "TimeoutError: of its own"),
        ("cancellation", "CancelledError: of its own"),
        ("end of the process", "SystemExit: 3"),
        ("strange words", r"OSError: no file a\udcff.txt"),
        ("strange role", r"[0].role: 'a\udcff': must be a text of 1 to 64 printable characters"),
        ("nothing", "returned NoneType, want a list of companions, which may be empty"),
        ("no mapping", "[0]: 'not this': want a mapping with suffix, role, prompt and perhaps overrides"),
        ("many", "returned 9 companions, at most 8 may be"),
        ("twice", "[1].suffix: '-negative': another companion has it too"),
        ("suffix", "[0].suffix: 'a/b': must be 1 to 32 characters"),
        ("role", "[0].role: '': must be a text of 1 to 64 printable characters"),
        ("prompt", "[1].prompt.text: '': is empty"),
        ("no prompt", "[0]: prompt is missing"),
        ("strange prompt", "want a text, chat messages"),
        ("override", "[0].overrides.max_tokens: 0"),
        ("unknown override", "[0].overrides"),
        ("unknown", "[0].colour: unknown"),
    ],
)
async def test_expansion_is_all_or_nothing_and_its_mistake_is_named(
    tmp_path: Path, prompt: str, problem: str
) -> None:
    async with cluster(tmp_path, stages("of_its_kind")) as mesh:
        writer = await mesh.add("writer")
        error = await mesh.generate(prompt, request_id="bad").error()
        assert (error.reason, error.metadata["stage"]) == (Reason.ADAPTER_FAILED, "writer")
        assert error.message.startswith(f"prompt_expand {HERE}.of_its_kind: ")
        assert problem in error.message
        await mesh.quiet()
        call = mesh.generate("good", request_id="good")
        tasks = await family(writer)
        assert tasks[""].submit.prompt.text == "good", "the function has a copy of the prompt"
        assert {submit.request_id for submit in writer.submitted} == {"good", "good-negative"}
        call.cancel()
        await mesh.quiet()


async def test_expansion_without_companions_leaves_the_request_alone(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages("of_its_kind")) as mesh:
        writer, painter = await mesh.add("writer"), await mesh.add("painter")
        call = mesh.generate("none")
        (await writer.next_task()).finish()
        assert [i.role for i in (await painter.next_task()).submit.inputs] == [""]
        call.cancel()
        await mesh.quiet()


async def test_expansion_runs_off_the_event_loop_and_has_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expansion.Expander.__init__, "__defaults__", (0.3,))
    expansions.release.clear()
    async with cluster(tmp_path, stages("blocks")) as mesh:
        writer = await mesh.add("writer")
        blocked = mesh.generate("block", request_id="blocked")
        try:
            other = mesh.generate("go on", request_id="other")
            tasks = await family(writer)
            assert tasks[""].submit.request_id == "other", "it went ahead while the other's function ran"
            error = await blocked.error()
        finally:
            expansions.release.set()
        assert error.reason is Reason.ADAPTER_FAILED
        assert "took longer than 0.3 s" in error.message
        other.cancel()
        await mesh.quiet()
        assert {submit.request_id for submit in writer.submitted} == {"other", "other-negative"}


async def test_deadline_during_the_expansion_says_what_was_at_work(tmp_path: Path) -> None:
    expansions.release.clear()
    async with cluster(tmp_path, stages("blocks")) as mesh:
        writer = await mesh.add("writer")
        error = await mesh.generate("block", request_id="r", timeout=0.5).error()
        expansions.release.set()
        assert error.reason is Reason.REQUEST_TIMEOUT
        assert "stages at work: none, but prompt_expand" in error.message
        await mesh.quiet()
        assert not writer.submitted


async def test_abort_during_the_expansion_wins(tmp_path: Path) -> None:
    expansions.release.clear()
    async with cluster(tmp_path, stages("blocks")) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate("block", request_id="r")
        await eventually(lambda: mesh.gateway.orchestrator.running == 1)
        (result,) = await abort(mesh, "r")
        expansions.release.set()
        assert result.outcome == ABORTED
        await call.rest()
        assert call.finished.finish_reason == frame_pb.FINISH_REASON_ABORT
        probe = mesh.generate("after", request_id="probe")
        assert (await writer.next_task()).submit.request_id == "probe"
        probe.cancel()
        await mesh.quiet()

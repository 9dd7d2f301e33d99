"""Companions (classifier-free guidance): further visits to the first stage, made of the prompt, for a later stage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh_head.orchestration.recovery import RecoveryLimits
from tests.mesh.harness import PAINTER, WRITER, Cluster, cluster, eventually, llm
from tests.mesh.scripted_stage import ScriptedStage, ScriptedTask
from tests.mesh.test_abort import ABORTED, UNCONFIRMED, abort

HERE = "tests.mesh.expansions"


def stages(function: str = "negative", **writer: Any) -> list[dict[str, Any]]:
    return [{**WRITER, "prompt_expand": f"{HERE}.{function}", **writer}, PAINTER]


async def family(stage: ScriptedStage, count: int = 2) -> dict[str, ScriptedTask]:
    """The next tasks of a stage, by the role of the companion; the parent's is empty."""
    tasks = [await stage.next_task() for _ in range(count)]
    return {task.submit.companion_role: task for task in tasks}


async def test_R10_companion_has_its_parents_id_with_a_suffix_its_own_prompt_and_overrides(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages("two")) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate("a star", request_id="r", sampling=[llm("writer", max_tokens=7, seed=3)])
        made = {role: task.submit for role, task in (await family(writer, 3)).items()}
        assert {role: submit.request_id for role, submit in made.items()} == {
            "": "r", "negative": "r-negative", "other": "r.other",
        }  # fmt: skip
        assert (made[""].prompt.text, made["negative"].prompt.text) == ("a star", "not a star")
        assert made["other"].prompt.chat.messages[0].content == "instead of a star"
        assert [made[role].params.llm.max_tokens for role in ("", "negative", "other")] == [7, 14, 7]
        assert {submit.params.llm.seed for submit in made.values()} == {3}
        assert made["negative"].params.llm.HasField("temperature")
        assert not made[""].params.llm.HasField("temperature")
        call.cancel()
        await mesh.quiet()


async def test_R10_companions_are_made_only_if_the_request_goes_beyond_the_first_stage(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages()) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate(request_id="r", output_stages=["writer"])
        task = await writer.next_task()
        task.tokens([1], "caption")
        task.finish()
        await call.rest()
        assert [submit.companion_role for submit in writer.submitted] == [""]
        assert call.finished.finish_reason == frame_pb.FINISH_REASON_COMPLETE


async def test_R10_consumer_receives_parent_and_companions_by_role_once_all_are_done(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages("two")) as mesh:
        writer, painter = await mesh.add("writer"), await mesh.add("painter")
        call = mesh.generate(request_id="r")
        tasks = await family(writer, 3)
        for number, role in enumerate(("negative", "", "other")):
            assert not painter.has_arrivals
            tasks[role].tokens([number], f"text of {role or 'the parent'}")
            tasks[role].finish(completion_tokens=1, prompt_tokens=4)
        picture = await painter.next_task()
        assert [(i.stage, i.role, i.text, list(i.token_ids), i.finished) for i in picture.submit.inputs] == [
            ("writer", "", "text of the parent", [1], True),
            ("writer", "negative", "text of negative", [0], True),
            ("writer", "other", "text of other", [2], True),
        ]
        assert picture.submit.request_id == "r"
        picture.media(b"png")
        picture.finish(images=1)
        await call.rest()
        # The client gets the request's own text only, and usage that counts everything.
        assert call.text() == "text of the parent"
        assert (call.finished.usage.completion_tokens, call.finished.usage.prompt_tokens) == (3, 12)
        assert [(row.stage, row.companion) for row in call.finished.stages] == [
            ("writer", ""), ("painter", ""), ("writer", "-negative"), ("writer", ".other"),
        ]  # fmt: skip
        await mesh.quiet()


async def test_R2_companion_goes_to_its_parents_replica(tmp_path: Path) -> None:
    options = {"routing": {"policy": "round-robin"}}
    async with cluster(tmp_path, stages("two"), **options) as mesh:
        writers = [await mesh.add("writer", number) for number in range(3)]
        calls = [mesh.generate(request_id=f"r{number}") for number in range(12)]
        await eventually(lambda: sum(len(writer.submitted) for writer in writers) == 36)
        for writer in writers:
            ids = {submit.request_id for submit in writer.submitted if not submit.companion_role}
            assert len(ids) == 4
            expected = {name + suffix for name in ids for suffix in ("", "-negative", ".other")}
            assert {submit.request_id for submit in writer.submitted} == expected
        for call in calls:
            call.cancel()
        await mesh.quiet()


async def test_R10_companions_failure_fails_the_parent_with_the_reason(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages()) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate(request_id="r")
        tasks = await family(writer)
        tasks["negative"].fail(MeshError(Reason.STAGE_FAILED, "the grammar is bad"))
        error = await call.error()
        assert error.reason is Reason.STAGE_FAILED
        assert error.message == "companion r-negative (role 'negative'): the grammar is bad"
        assert (error.metadata["stage"], error.metadata["companion"]) == ("writer", "r-negative")
        await tasks[""].aborted()
        await mesh.quiet()


async def test_companion_that_its_replica_aborts_fails_the_parent(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages()) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate(request_id="r")
        tasks = await family(writer)
        tasks["negative"].confirm_abort()
        error = await call.error()
        assert "companion r-negative" in error.message and "aborted the task" in error.message
        await tasks[""].aborted()
        await mesh.quiet()


async def test_parents_failure_stops_its_companions(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages("two")) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate(request_id="r")
        tasks = await family(writer, 3)
        tasks["other"].finish()
        tasks[""].fail(MeshError(Reason.STAGE_FAILED, "too long"))
        error = await call.error()
        assert error.message == "too long" and "companion" not in error.metadata
        await tasks["negative"].aborted()
        await mesh.quiet()


async def test_R10_aborting_the_parent_aborts_companions_and_waits_for_their_word(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages()) as mesh:
        writer = await mesh.add("writer")
        writer.confirms_aborts = False
        call = mesh.generate(request_id="r")
        tasks = await family(writer)
        asking = asyncio.create_task(abort(mesh, "r"))
        for task in tasks.values():
            await task.aborted()
        tasks[""].confirm_abort()
        await eventually(lambda: mesh.inflight == 1)
        assert not asking.done()
        tasks["negative"].confirm_abort()
        (result,) = await asking
        assert result.outcome == ABORTED
        await call.rest()
        assert call.finished.finish_reason == frame_pb.FINISH_REASON_ABORT
        await mesh.quiet()


async def test_abort_says_which_companion_did_not_confirm(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages()) as mesh:
        writer = await mesh.add("writer")
        writer.confirms_aborts = False
        call = mesh.generate(request_id="r")
        tasks = await family(writer)
        tasks[""].finish()
        (result,) = await abort(mesh, "r", timeout_s=0.2)
        assert result.outcome == UNCONFIRMED
        assert list(result.unconfirmed_stages) == ["writer (companion -negative)"]
        await call.rest()
        tasks["negative"].confirm_abort()
        await mesh.quiet()


async def test_client_that_leaves_stops_companions_too(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages("two")) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate()
        tasks = await family(writer, 3)
        call.cancel()
        for task in tasks.values():
            await task.aborted()
        await mesh.quiet()


async def test_lost_replica_moves_parent_and_companions_together(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages("two")) as mesh:
        writers = [await mesh.add("writer", number) for number in range(3)]
        painter = await mesh.add("painter")
        call = mesh.generate(request_id="r", sampling=[llm("writer", temperature=0.0)])
        await eventually(lambda: sum(len(writer.submitted) for writer in writers) == 3)
        first = next(writer for writer in writers if writer.submitted)
        tasks = await family(first, 3)
        tasks[""].tokens([1, 2], "to be ")
        tasks["negative"].tokens([7], "not ")
        tasks["other"].tokens([9], "or")
        tasks["other"].finish()
        await eventually(lambda: call_has(mesh, "r", "-negative", tokens=1) and call_has(mesh, "r", ".other", tokens=1))
        await first.crash()
        await eventually(lambda: sum(len(writer.submitted) for writer in writers) == 5)
        second = next(writer for writer in writers if writer is not first and writer.submitted)
        again = await family(second)
        # On one replica again, each from where it was; the one that was done stays done.
        assert {role: list(task.submit.resume_token_ids) for role, task in again.items()} == {
            "": [1, 2], "negative": [7],
        }  # fmt: skip
        assert again["negative"].submit.prompt.text == "not hello"
        again[""].tokens([3], "continued")
        again["negative"].tokens([8], "to be")
        for task in again.values():
            task.finish()
        picture = await painter.next_task()
        assert {i.role: i.text for i in picture.submit.inputs} == {
            "": "to be continued", "negative": "not to be", "other": "or",
        }  # fmt: skip
        picture.finish()
        await call.rest()
        recovered = {row.companion: row.finished.recovery for row in call.finished.stages if row.stage == "writer"}
        assert recovered == {"": "exact", "-negative": "exact", ".other": ""}
        await mesh.quiet()


def call_has(mesh: Cluster, request_id: str, suffix: str, tokens: int) -> bool:
    """Whether the head has so many tokens of a companion."""
    tasks = mesh.gateway.orchestrator._runs[request_id].machine.tasks
    return len(tasks[f"writer (companion {suffix})"].output.token_ids) == tokens


async def test_companion_that_is_lost_too_often_fails_the_parent(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages(), recovery=RecoveryLimits(max_attempts=1)) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate(request_id="r")
        tasks = await family(writer)
        tasks[""].finish()
        tasks["negative"].fail(MeshError(Reason.ENGINE_DEAD, "out of memory"))
        error = await call.error()
        assert error.reason is Reason.ENGINE_DEAD
        assert error.message == "companion r-negative (role 'negative'): out of memory"
        await mesh.quiet()


async def test_companion_that_makes_no_progress_fails_the_parent_by_its_name(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages()) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate(request_id="r")
        tasks = await family(writer)
        tasks[""].finish()
        orchestrator = mesh.gateway.orchestrator
        await eventually(lambda: mesh.inflight == 1)
        for now in (0.0, 5.0):
            orchestrator._runs["r"].check_progress(now, 5.0)
        error = await call.error()
        assert error.reason is Reason.ENGINE_STUCK
        assert error.message.startswith("companion r-negative (role 'negative'): stage 'writer' made no progress")
        assert (error.metadata["stage"], error.metadata["companion"]) == ("writer", "r-negative")
        await tasks["negative"].aborted()
        await mesh.quiet()


async def test_parent_waits_for_its_companions_with_a_deadline(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages(limits={"companion_timeout": 0.2})) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate(request_id="r")
        tasks = await family(writer)
        tasks[""].finish()
        error = await call.error()
        assert error.reason is Reason.REQUEST_TIMEOUT
        assert error.message == (
            "companion r-negative (role 'negative'): was not done 0.2 s after its request's own output "
            "(limits.companion_timeout)"
        )
        await tasks["negative"].aborted()
        await mesh.quiet()


async def test_companions_are_shown_among_the_requests_tasks(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages()) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate(request_id="r")
        await family(writer)
        (info,) = mesh.gateway.orchestrator.requests("")
        assert [(task.stage, task.companion, task.state) for task in info.tasks] == [
            ("writer", "", "submitted"), ("painter", "", "waiting"), ("writer", "-negative", "submitted"),
        ]  # fmt: skip
        call.cancel()
        await mesh.quiet()


async def test_interactive_request_is_refused_where_companions_would_be_made(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages()) as mesh:
        await mesh.add("writer")
        for outputs, refused in ((["painter"], True), (["writer"], False)):
            opening = inference_pb.GenerateRequest(request_id="r", output_stages=outputs)
            opening.prompt.text = "a"
            planner = mesh.gateway.orchestrator._planner("")
            if refused:
                with pytest.raises(MeshError, match="makes companions of whole prompts only"):
                    planner.plan(opening, is_interactive=True)
            else:
                assert planner.plan(opening, is_interactive=True).companion_readers == ()


async def test_request_taken_up_from_another_head_makes_its_companions_again(tmp_path: Path) -> None:
    async with cluster(tmp_path, stages()) as mesh:
        writer, painter = await mesh.add("writer"), await mesh.add("painter")
        had = inference_pb.StageResume(stage="writer", token_ids=[1, 2], text="a caption", finished=True)
        resume = inference_pb.ResumePoint(sequence=3, stages=[had])
        call = mesh.generate("a star", request_id="r", resume=resume)
        (await writer.next_task()).finish()
        picture = await painter.next_task()
        assert [submit.request_id for submit in writer.submitted] == ["r-negative"], "the caption is there already"
        assert [(i.role, i.text) for i in picture.submit.inputs] == [("", "a caption"), ("negative", "")]
        picture.finish()
        await call.rest()
        assert call.finished.finish_reason == frame_pb.FINISH_REASON_COMPLETE
        await mesh.quiet()

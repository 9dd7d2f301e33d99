"""What a client sees when replicas are lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh_head.orchestration.recovery import RecoveryLimits
from tests.mesh.harness import PAINTER, WRITER, Cluster, cluster, diffusion, eventually, llm
from tests.mesh.scripted_stage import ScriptedStage

GREEDY = [llm("writer", temperature=0, max_tokens=10)]
SAMPLED = [llm("writer", temperature=0.7, max_tokens=10)]


async def pair(mesh: Cluster, stage: str = "writer") -> list[ScriptedStage]:
    """Two replicas; which one gets the first task is the policy's."""
    return [await mesh.add(stage, replica_id) for replica_id in range(2)]


async def first_task(replicas: list[ScriptedStage]):
    """The task, the replica that has it, and the other one."""
    await eventually(lambda: any(replica.has_arrivals for replica in replicas))
    mine = next(replica for replica in replicas if replica.has_arrivals)
    return await mine.next_task(), mine, next(replica for replica in replicas if replica is not mine)


async def test_a_loss_before_output_is_not_seen(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        replicas = await pair(mesh)
        call = mesh.generate(sampling=SAMPLED)
        task, lost, other = await first_task(replicas)
        task.started()
        await lost.crash()
        again = await other.next_task()
        assert again.submit.attempt == 2
        assert list(again.submit.resume_token_ids) == []
        assert again.submit.params == task.submit.params
        again.tokens([1], "x")
        again.finish()
        await call.rest()
        assert call.text() == "x"
        stage = call.finished.stages[0].finished
        assert stage.recovery == "restarted"
        assert [r.incarnation for r in stage.replicas] == [lost.incarnation, other.incarnation]
        await mesh.quiet()


async def test_a_greedy_task_resumes_after_the_tokens_that_were_sent(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        replicas = await pair(mesh)
        call = mesh.generate(sampling=GREEDY)
        task, lost, other = await first_task(replicas)
        task.tokens([1, 2], "one ")
        task.tokens([3], "tw")
        await eventually_text(call, "one tw")
        await lost.crash()
        again = await other.next_task()
        assert list(again.submit.resume_token_ids) == [1, 2, 3]
        assert again.submit.resume_text_chars == len("one tw")
        assert again.submit.params.llm.max_tokens == 10
        again.tokens([4], "o three")
        again.finish(prompt_tokens=5, completion_tokens=1)
        await call.rest()
        assert call.text() == "one two three"
        assert call.token_ids() == [1, 2, 3, 4]
        stage = call.finished.stages[0].finished
        assert stage.recovery == "exact"
        assert stage.usage.completion_tokens == 4
        assert [r.sequence for r in call.responses] == list(range(1, len(call.responses) + 1))
        await mesh.quiet()


async def eventually_text(call, text: str) -> None:
    while call.text() != text:
        await call.next()


async def test_a_sampled_task_continues_and_says_so(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        replicas = await pair(mesh)
        call = mesh.generate(sampling=SAMPLED)
        task, lost, other = await first_task(replicas)
        task.tokens([1], "a")
        await eventually_text(call, "a")
        await lost.crash()
        again = await other.next_task()
        assert list(again.submit.resume_token_ids) == [1]
        again.finish()
        await call.rest()
        assert call.finished.stages[0].finished.recovery == "continued"


@pytest.mark.parametrize(
    ("params", "policy"),
    [
        ({"temperature": 0.7}, inference_pb.RECOVERY_POLICY_EXACT_OR_FAIL),
        ({"temperature": 0, "presence_penalty": 0.5}, inference_pb.RECOVERY_POLICY_BEST_EFFORT),
        ({"temperature": 0, "frequency_penalty": 0.5}, inference_pb.RECOVERY_POLICY_BEST_EFFORT),
        ({"temperature": 0, "structured_outputs": sampling_pb.StructuredOutputs(regex="a+")}, 0),
        ({"temperature": 0, "n": 2}, 0),
    ],
    ids=["exact_or_fail", "presence_penalty", "frequency_penalty", "structured", "n"],
)
@pytest.mark.parametrize("delivered", [True, False], ids=["delivered", "not_delivered"])
async def test_what_cannot_be_resumed_restarts_unless_it_was_delivered(
    tmp_path: Path, params: dict, policy: int, delivered: bool
) -> None:
    mode = inference_pb.OUTPUT_MODE_DELTA if delivered else inference_pb.OUTPUT_MODE_FINAL_ONLY
    async with cluster(tmp_path, [WRITER]) as mesh:
        replicas = await pair(mesh)
        call = mesh.generate(sampling=[llm("writer", **params)], recovery_policy=policy, output_mode=mode)
        task, lost, other = await first_task(replicas)
        task.tokens([1, 2], "ab")
        if delivered:
            await eventually_text(call, "ab")
        else:
            run = next(iter(mesh.gateway.orchestrator._runs.values()))
            await eventually(lambda: not run.machine.tasks["writer"].output.is_empty)
        await lost.crash()
        if delivered:
            error = await call.error()
            assert error.reason is Reason.STAGE_LOST
            assert error.metadata["delivered_tokens"] == "2"
            assert not other.has_arrivals
        else:
            again = await other.next_task()
            assert list(again.submit.resume_token_ids) == []
            again.tokens([7], "new")
            again.finish()
            await call.rest()
            assert call.text() == "new"
            assert call.finished.stages[0].finished.recovery == "restarted"
        await mesh.quiet()


async def test_a_painter_restarts_with_the_seed_it_had(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER, PAINTER]) as mesh:
        writer = await mesh.add("writer")
        painters = await pair(mesh, "painter")
        call = mesh.generate(sampling=[diffusion("painter", num_inference_steps=4)])
        (await writer.next_task()).finish()
        task, lost, other = await first_task(painters)
        task.progress(1, 4)
        while not call.responses or not call.responses[-1].frame.HasField("progress"):
            await call.next()
        await lost.crash()
        again = await other.next_task()
        assert again.submit.params.diffusion.seed == task.submit.params.diffusion.seed
        again.progress(1, 4)
        again.media(b"PNG")
        again.finish(frame_pb.FINISH_REASON_COMPLETE)
        await call.rest()
        assert call.kinds().count("media") == 1
        assert call.finished.stages[1].finished.recovery == "restarted"


async def test_pictures_that_were_delivered_are_not_delivered_again(tmp_path: Path) -> None:
    async with cluster(tmp_path, [{**PAINTER, "inputs": []}]) as mesh:
        painters = await pair(mesh, "painter")
        call = mesh.generate(sampling=[diffusion("painter", num_images_per_prompt=3)])
        task, lost, other = await first_task(painters)
        task.media(b"0", 0)
        task.media(b"1", 1)
        while call.kinds().count("media") < 2:
            await call.next()
        await lost.crash()
        again = await other.next_task()
        for index in range(3):
            again.media(b"%d" % index, index)
        again.finish()
        await call.rest()
        assert [r.frame.media.data for r in call.responses if r.frame.HasField("media")] == [b"0", b"1", b"2"]


async def test_a_replica_that_says_its_engine_died_is_left_for_another(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        replicas = await pair(mesh)
        call = mesh.generate(sampling=GREEDY)
        task, _, other = await first_task(replicas)
        task.tokens([1], "a")
        task.fail(MeshError(Reason.ENGINE_DEAD, "EngineCore died"))
        again = await other.next_task()
        assert list(again.submit.resume_token_ids) == [1]
        again.finish()
        await call.rest()
        await mesh.quiet()


async def test_a_full_replica_is_left_for_another_and_a_full_stage_says_so_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        replicas = await pair(mesh)
        call = mesh.generate()
        task, _, other = await first_task(replicas)
        task.fail(MeshError(Reason.OVERLOADED, "the replica is full"))
        (await other.next_task()).fail(MeshError(Reason.OVERLOADED, "this one too"))
        error = await call.error()
        assert error.reason is Reason.OVERLOADED
        assert error.message == "this one too"
        assert error.retry_delay_s
        await mesh.quiet()


async def test_attempts_are_bounded(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER], recovery=RecoveryLimits(max_attempts=2)) as mesh:
        replicas = [await mesh.add("writer", replica_id) for replica_id in range(3)]
        call = mesh.generate()
        for attempt in (1, 2):
            await eventually(lambda: any(replica.has_arrivals for replica in replicas))
            replica = next(replica for replica in replicas if replica.has_arrivals)
            task = await replica.next_task()
            assert task.submit.attempt == attempt
            await replica.crash()
        error = await call.error()
        assert error.reason is Reason.REPLICA_LOST
        assert error.retryable
        await mesh.quiet()


async def test_recovery_can_be_switched_off(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER], recovery=RecoveryLimits(max_attempts=1)) as mesh:
        replicas = await pair(mesh)
        call = mesh.generate()
        _, lost, other = await first_task(replicas)
        await lost.crash()
        assert (await call.error()).reason is Reason.REPLICA_LOST
        assert not other.has_arrivals


async def test_a_lone_replica_whose_link_broke_is_used_again_once_it_is_back(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate(sampling=GREEDY)
        task = await writer.next_task()
        task.tokens([1], "a")
        await eventually_text(call, "a")
        writer.break_link()
        again = await writer.next_task()
        assert list(again.submit.resume_token_ids) == [1]
        again.tokens([2], "b")
        again.finish()
        await call.rest()
        assert call.text() == "ab"
        assert writer.links == 2
        assert mesh.membership.link_log == [(mesh.key("writer"), up) for up in (True, False, True)]


async def test_a_restarted_replica_takes_over_its_own_task(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        old = await mesh.add("writer")
        call = mesh.generate(sampling=GREEDY)
        task = await old.next_task()
        task.tokens([1], "a")
        await eventually_text(call, "a")
        await old.crash()
        new = await mesh.add("writer")
        again = await new.next_task()
        assert list(again.submit.resume_token_ids) == [1]
        again.finish()
        await call.rest()
        await mesh.quiet()


async def test_a_task_that_had_used_its_budget_ends_without_another_attempt(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        replicas = await pair(mesh)
        call = mesh.generate(sampling=[llm("writer", temperature=0, max_tokens=2)])
        task, lost, other = await first_task(replicas)
        task.tokens([1, 2], "ab")
        await eventually_text(call, "ab")
        await lost.crash()
        await call.rest()
        stage = call.finished.stages[0].finished
        assert stage.finish_reason == frame_pb.FINISH_REASON_LENGTH
        assert stage.usage.completion_tokens == 2
        assert not other.has_arrivals


async def test_a_loss_in_the_middle_of_many_leaves_the_others_alone(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        replicas = await pair(mesh)
        calls = [mesh.generate(f"p{n}", sampling=GREEDY) for n in range(8)]
        await eventually(lambda: mesh.inflight == 8)
        tasks = [[await replica.next_task() for _ in range(4)] for replica in replicas]
        for task in tasks[0] + tasks[1]:
            task.tokens([1], "a")
        for call in calls:
            await eventually_text(call, "a")
        await replicas[0].crash()
        moved = [await replicas[1].next_task() for _ in range(4)]
        assert {t.submit.prompt.text for t in moved} == {t.submit.prompt.text for t in tasks[0]}
        for task in tasks[1] + moved:
            task.tokens([2], "b")
            task.finish()
        for call in calls:
            await call.rest()
            assert call.text() == "ab"
        await mesh.quiet()


async def test_a_client_goes_on_with_a_request_that_a_head_lost(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER, PAINTER]) as mesh:
        writer, painter = await mesh.add("writer"), await mesh.add("painter")
        resume = inference_pb.ResumePoint(
            sequence=7, stages=[inference_pb.StageResume(stage="writer", token_ids=[1, 2], text="a red")]
        )
        call = mesh.generate(sampling=GREEDY, resume=resume)
        task = await writer.next_task()
        assert list(task.submit.resume_token_ids) == [1, 2]
        assert task.submit.resume_text_chars == 5
        task.tokens([3], " circle")
        task.finish()
        picture = await painter.next_task()
        assert picture.submit.inputs[0].text == "a red circle"
        picture.finish()
        await call.rest()
        assert call.responses[0].sequence == 8
        assert call.text() == " circle"
        assert call.finished.stages[0].finished.recovery == "exact"


async def test_a_stage_that_the_client_has_whole_is_not_run_again(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER, PAINTER]) as mesh:
        writer, painter = await mesh.add("writer"), await mesh.add("painter")
        done = inference_pb.StageResume(stage="writer", token_ids=[1], text="a caption", finished=True)
        call = mesh.generate(sampling=SAMPLED, resume=inference_pb.ResumePoint(sequence=3, stages=[done]))
        picture = await painter.next_task()
        assert picture.submit.inputs[0].text == "a caption"
        picture.finish()
        await call.rest()
        assert call.text() == ""
        assert writer.submitted == []


async def test_a_request_that_cannot_be_resumed_for_its_client_says_stage_lost(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        had = inference_pb.StageResume(stage="writer", token_ids=[1], text="a")
        resume = inference_pb.ResumePoint(sequence=1, stages=[had])
        sampling = [llm("writer", temperature=0, presence_penalty=1.0)]
        error = await mesh.generate(sampling=sampling, resume=resume).error()
        assert error.reason is Reason.STAGE_LOST
        assert writer.submitted == []

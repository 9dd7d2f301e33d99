"""A request's way through the head, with scripted replicas."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from tests.mesh.harness import PAINTER, WRITER, cluster, diffusion, eventually, llm


async def test_R7_text_streams_to_the_client_with_tags_and_sequence(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate(request_id="r-1")
        task = await writer.next_task()
        task.tokens([1, 2], "ab")
        first = await call.next()
        assert first.request_id == "r-1"
        assert first.sequence == 1
        assert (first.frame.stage, first.frame.replica_id) == ("writer", 0)
        assert (first.frame.text.text, list(first.frame.text.token_ids)) == ("ab", [1, 2])
        task.tokens([3], "c")
        task.finish(prompt_tokens=4, completion_tokens=3)
        await call.rest()
        assert call.text() == "abc"
        assert call.token_ids() == [1, 2, 3]
        assert [r.sequence for r in call.responses] == list(range(1, len(call.responses) + 1))
        assert call.finished.finish_reason == frame_pb.FINISH_REASON_COMPLETE
        assert call.finished.usage.completion_tokens == 3
        await mesh.quiet()


async def test_chain_feeds_the_writers_text_to_the_painter(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER, PAINTER]) as mesh:
        writer, painter = await mesh.add("writer"), await mesh.add("painter")
        call = mesh.generate("a wish")
        task = await writer.next_task()
        assert not task.submit.last_stage
        assert not painter.has_arrivals
        task.tokens([1], "a red ")
        task.tokens([2], "circle")
        task.finish()
        picture = await painter.next_task()
        (upstream,) = picture.submit.inputs
        assert (upstream.stage, upstream.text, list(upstream.token_ids)) == ("writer", "a red circle", [1, 2])
        assert upstream.finished
        assert picture.submit.prompt.text == "a wish"
        assert picture.submit.last_stage
        assert picture.submit.params.diffusion.HasField("seed")
        picture.progress(1, 2)
        picture.progress(2, 2)
        picture.media(b"PNG")
        picture.finish(frame_pb.FINISH_REASON_COMPLETE, images=1, diffusion_steps=2)
        await call.rest()
        assert [k for k in call.kinds() if k != "text"] == [
            "stage_finished",
            "progress",
            "progress",
            "media",
            "stage_finished",
            "finished",
        ]
        assert [s.stage for s in call.finished.stages] == ["writer", "painter"]
        assert call.finished.usage.images == 1
        assert all(s.finished.timings.HasField("total") for s in call.finished.stages)


async def test_R4_stages_that_serve_no_wanted_output_are_skipped(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER, PAINTER]) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate(output_modalities=[frame_pb.MODALITY_TEXT])
        task = await writer.next_task()
        assert task.submit.last_stage
        task.finish()
        await call.rest()
        assert [s.stage for s in call.finished.stages] == ["writer"]


async def test_R4_a_stage_that_is_no_wanted_output_runs_but_is_not_delivered(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER, PAINTER]) as mesh:
        writer, painter = await mesh.add("writer"), await mesh.add("painter")
        call = mesh.generate(output_stages=["painter"])
        task = await writer.next_task()
        task.tokens([1], "x")
        task.finish()
        (await painter.next_task()).finish()
        await call.rest()
        assert {r.frame.stage for r in call.responses[:-1]} == {"painter"}
        assert [s.stage for s in call.finished.stages] == ["writer", "painter"]


async def test_R8_final_only_delivers_each_output_once_when_its_stage_is_done(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER, PAINTER]) as mesh:
        writer, painter = await mesh.add("writer"), await mesh.add("painter")
        call = mesh.generate(output_mode=inference_pb.OUTPUT_MODE_FINAL_ONLY)
        task = await writer.next_task()
        for token in range(5):
            task.tokens([token], str(token))
        task.finish()
        picture = await painter.next_task()
        assert not picture.submit.delta
        picture.media(b"one")
        picture.finish()
        await call.rest()
        assert call.kinds() == ["text", "stage_finished", "media", "stage_finished", "finished"]
        assert call.text() == "01234"


async def test_several_completions_keep_their_index_and_log_probabilities(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        for mode in (inference_pb.OUTPUT_MODE_DELTA, inference_pb.OUTPUT_MODE_FINAL_ONLY):
            call = mesh.generate(sampling=[llm("writer", n=2, logprobs=1)], output_mode=mode)
            task = await writer.next_task()
            task.text(index=0, text="a", token_ids=[1], logprobs=[-1.0])
            task.text(index=1, text="x", token_ids=[7], logprobs=[-2.0])
            task.text(index=0, text="b", token_ids=[2], logprobs=[-3.0])
            task.finish()
            await call.rest()
            texts = {0: "", 1: ""}
            logprobs: dict[int, list[float]] = {0: [], 1: []}
            for response in call.responses:
                if response.frame.HasField("text"):
                    texts[response.frame.text.index] += response.frame.text.text
                    logprobs[response.frame.text.index] += response.frame.text.logprobs
            assert texts == {0: "ab", 1: "x"}
            assert logprobs == {0: [-1.0, -3.0], 1: [-2.0]}


async def test_text_before_an_event_is_delivered_before_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate()
        task = await writer.next_task()
        for step in range(20):
            task.tokens([step], f"{step},")
            task.progress(step, 20)
        task.finish()
        await call.rest()
        seen = ""
        for response in call.responses:
            if response.frame.HasField("text"):
                seen += response.frame.text.text
            elif response.frame.HasField("progress"):
                assert seen.endswith(f"{response.frame.progress.step},")


async def test_a_failure_reaches_the_client_with_reason_and_stage(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate()
        (await writer.next_task()).fail(MeshError(Reason.ADAPTER_FAILED, "template: no field 'x'", field="x"))
        error = await call.error()
        assert error.reason is Reason.ADAPTER_FAILED
        assert error.message == "template: no field 'x'"
        assert error.metadata["stage"] == "writer"
        assert error.metadata["replica"] == "demo/writer/0"
        await mesh.quiet()


async def test_one_bad_request_harms_no_other(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        calls = [mesh.generate(f"p{n}") for n in range(6)]
        tasks = {(task := await writer.next_task()).submit.prompt.text: task for _ in calls}
        tasks["p3"].fail(MeshError(Reason.STAGE_FAILED))
        for n in (0, 1, 2, 4, 5):
            tasks[f"p{n}"].tokens([n], f"t{n}")
            tasks[f"p{n}"].finish()
        assert (await calls[3].error()).reason is Reason.STAGE_FAILED
        for n in (0, 1, 2, 4, 5):
            await calls[n].rest()
            assert calls[n].text() == f"t{n}"
        await mesh.quiet()


BAD_REQUESTS = [
    ({"prompt": ""}, Reason.INVALID_REQUEST, "prompt.text: ''"),
    ({"request_id": "a b"}, Reason.INVALID_REQUEST, "request_id: 'a b'"),
    ({"request_id": "x" * 129}, Reason.INVALID_REQUEST, "request_id"),
    ({"pipeline": "nope"}, Reason.UNKNOWN_PIPELINE, "pipeline: 'nope'"),
    ({"output_stages": ["voice"]}, Reason.INVALID_REQUEST, "output_stages[0]: 'voice'"),
    (
        {"output_modalities": [frame_pb.MODALITY_AUDIO]},
        Reason.INVALID_REQUEST,
        "output_modalities[0]: 'MODALITY_AUDIO'",
    ),
    ({"output_modalities": [0]}, Reason.INVALID_REQUEST, "output_modalities[0]: 'MODALITY_UNSPECIFIED'"),
    (
        {"sampling": [llm("writer", temperature=-1)]},
        Reason.INVALID_REQUEST,
        "sampling[writer].temperature: -1.0: must be >= 0",
    ),
    (
        {"sampling": [llm("writer", max_tokens=0)]},
        Reason.INVALID_REQUEST,
        "sampling[writer].max_tokens: 0: must be >= 1",
    ),
    ({"sampling": [llm("writer", top_p=float("nan"))]}, Reason.INVALID_REQUEST, "sampling[writer].top_p: nan"),
    (
        {"sampling": [diffusion("painter", num_inference_steps=0)]},
        Reason.INVALID_REQUEST,
        "sampling[painter].num_inference_steps: 0",
    ),
    ({"sampling": [llm("painter")]}, Reason.INVALID_REQUEST, "takes `diffusion` parameters"),
    ({"sampling": [llm("nobody")]}, Reason.INVALID_REQUEST, "sampling[0].stage: 'nobody'"),
    ({"sampling": [llm("")]}, Reason.INVALID_REQUEST, "sampling: 1: sets without stage names"),
    ({"sampling": [llm("writer"), llm("writer")]}, Reason.INVALID_REQUEST, "sampling[1].stage: 'writer'"),
    ({"lora": {"name": "x"}}, Reason.INVALID_REQUEST, "lora.name: 'x'"),
    ({"cache_salt": "s" * 300}, Reason.INVALID_REQUEST, "cache_salt"),
    ({"prompt": "x" * 2000}, Reason.PROMPT_TOO_LARGE, "prompt: 2003 bytes"),
]


@pytest.mark.parametrize(("fields", "reason", "text"), BAD_REQUESTS, ids=[row[2] for row in BAD_REQUESTS])
async def test_bad_input_names_the_field_and_nothing_is_submitted(
    tmp_path: Path, fields: dict, reason: Reason, text: str
) -> None:
    limited = {**WRITER, "limits": {"max_prompt_bytes": 1024}}
    async with cluster(tmp_path, [limited, PAINTER]) as mesh:
        writer = await mesh.add("writer")
        error = await mesh.generate(**fields).error()
        assert error.reason is reason
        assert text in error.message
        assert writer.submitted == []
        assert mesh.inflight == 0


async def test_R5_sampling_parameters_go_by_name_or_position_over_the_stages_defaults(tmp_path: Path) -> None:
    stages = [{**WRITER, "default_sampling_params": {"temperature": 0.5, "max_tokens": 7, "stop": ["x"]}}, PAINTER]
    async with cluster(tmp_path, stages) as mesh:
        writer = await mesh.add("writer")
        only_text = [frame_pb.MODALITY_TEXT]
        mesh.generate(sampling=[llm("writer", temperature=0.0)], output_modalities=only_text)
        params = (await writer.next_task()).submit.params.llm
        assert (params.temperature, params.max_tokens, list(params.stop)) == (0.0, 7, ["x"])
        assert params.HasField("temperature")
        mesh.generate(sampling=[llm("", stop=["y", "z"]), diffusion("")], output_modalities=only_text)
        params = (await writer.next_task()).submit.params.llm
        assert (params.temperature, list(params.stop)) == (0.5, ["y", "z"])


async def test_R5_one_set_without_a_name_serves_a_pipeline_of_one_stage(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        mesh.generate(sampling=[llm("", max_tokens=3)])
        assert (await writer.next_task()).submit.params.llm.max_tokens == 3


async def test_R6_a_request_id_that_still_runs_is_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        first = mesh.generate(request_id="same")
        task = await writer.next_task()
        error = await mesh.generate(request_id="same").error()
        assert error.reason is Reason.DUPLICATE_REQUEST
        assert error.code is grpc.StatusCode.ALREADY_EXISTS
        task.tokens([1], "x")
        task.finish()
        await first.rest()
        assert first.text() == "x"
        again = mesh.generate(request_id="same")
        (await writer.next_task()).finish()
        await again.rest()


async def test_the_deadline_of_the_call_crosses_the_head(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate(timeout=1.0)
        task = await writer.next_task()
        left = task.submit.time_left.ToNanoseconds() / 1e9
        assert 0.5 < left < 1.0
        error = await call.error()
        assert error.reason is Reason.REQUEST_TIMEOUT
        assert "writer" in error.message
        await task.aborted()
        await mesh.quiet()


async def test_R3_without_a_replica_it_waits_and_then_says_that_there_is_none(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        error = await mesh.generate(timeout=0.4).error()
        assert error.reason is Reason.NO_LIVE_REPLICA
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert "no node serves it" in error.message
        await mesh.quiet()


async def test_R3_a_request_that_waits_runs_as_soon_as_a_replica_is_ready(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        call = mesh.generate()
        pool = mesh.gateway.pools.of("demo", "writer")
        await eventually(lambda: pool.waiting == 1)
        writer = await mesh.add("writer")
        (await writer.next_task()).finish()
        await call.rest()
        assert pool.waiting == 0


async def test_R18_admission_refuses_at_once_beyond_what_may_run_and_wait(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER], limits={"max_inflight": 1, "max_waiting": 1}) as mesh:
        writer = await mesh.add("writer")
        first = mesh.generate("first")
        task = await writer.next_task()
        second = mesh.generate("second")
        await eventually(lambda: mesh.gateway.orchestrator.running == 2)
        error = await mesh.generate("third").error()
        assert error.reason is Reason.OVERLOADED
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.retry_delay_s == 1.0
        assert not writer.has_arrivals
        task.finish()
        await first.rest()
        (await writer.next_task()).finish()
        await second.rest()
        await mesh.quiet()


async def test_R18_admission_bounds_the_requests_of_one_token(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER], limits={"max_per_client": 1}) as mesh:
        writer = await mesh.add("writer")
        first = mesh.generate("first", token="of-ann")
        task = await writer.next_task()
        error = await mesh.generate("again", token="of-ann").error()
        assert error.reason is Reason.OVERLOADED and error.retry_delay_s == 1.0
        others = [mesh.generate("other", token="of-bob"), mesh.generate("nobody's"), mesh.generate("nobody's")]
        for _ in others:
            (await writer.next_task()).finish()
        task.finish()
        for call in [first, *others]:
            await call.rest()
        await mesh.quiet()
        second = mesh.generate("after it", token="of-ann")
        (await writer.next_task()).finish()
        await second.rest()


async def test_load_is_spread_over_the_replicas(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        replicas = [await mesh.add("writer", replica_id) for replica_id in range(3)]
        calls = [mesh.generate() for _ in range(9)]
        await eventually(lambda: mesh.inflight == 9)
        for replica in replicas:
            for _ in range(3):
                (await replica.next_task()).finish()
        for call in calls:
            await call.rest()


async def test_R19_pipelines_are_listed_with_what_keeps_them_from_serving(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER, PAINTER]) as mesh:
        await mesh.add("writer")
        listed = await mesh.stub.ListPipelines(inference_pb.ListPipelinesRequest())
        assert [p.name for p in listed.pipelines] == ["demo"]
        got = await mesh.stub.GetPipeline(inference_pb.GetPipelineRequest())
        writer, painter = got.pipeline.stages
        assert (writer.name, writer.ready_replicas, painter.ready_replicas) == ("writer", 1, 0)
        assert painter.output_modality == frame_pb.MODALITY_IMAGE
        assert [list(stage.supported_tasks) for stage in (writer, painter)] == [["generate"], ["generate"]]
        assert list(painter.inputs) == ["writer"]
        (problem,) = got.problems
        assert "painter" in problem
        assert got.header.head_epoch == "epoch"
        with pytest.raises(grpc.RpcError) as caught:
            await mesh.stub.GetPipeline(inference_pb.GetPipelineRequest(name="x"))
        assert MeshError.from_rpc_error(caught.value).reason is Reason.UNKNOWN_PIPELINE

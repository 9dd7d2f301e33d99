"""Stopping requests: by AbortRequest, by leaving, at any moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from google.protobuf import duration_pb2

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from tests.mesh.harness import PAINTER, WRITER, Cluster, cluster, eventually

ABORTED, UNCONFIRMED, UNKNOWN = (
    inference_pb.ABORT_OUTCOME_ABORTED,
    inference_pb.ABORT_OUTCOME_UNCONFIRMED,
    inference_pb.ABORT_OUTCOME_UNKNOWN,
)


async def abort(mesh: Cluster, *ids: str, timeout_s: float | None = None) -> list[inference_pb.AbortResult]:
    request = inference_pb.AbortRequestRequest(request_ids=ids)
    if timeout_s is not None:
        request.timeout.CopyFrom(duration_pb2.Duration(nanos=int(timeout_s * 1e9)))
    return list((await mesh.stub.AbortRequest(request)).results)


async def test_R13_abort_answers_when_every_stage_confirmed_and_delivers_what_there_is(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        writer.confirms_aborts = False
        call = mesh.generate(request_id="r")
        task = await writer.next_task()
        task.tokens([1], "part")
        asking = asyncio.create_task(abort(mesh, "r"))
        await task.aborted()
        assert not asking.done()
        task.confirm_abort()
        (result,) = await asking
        assert (result.request_id, result.outcome) == ("r", ABORTED)
        await call.rest()
        assert call.text() == "part"
        assert call.kinds()[-2:] == ["stage_finished", "finished"]
        assert call.responses[-2].frame.stage_finished.finish_reason == frame_pb.FINISH_REASON_ABORT
        assert call.finished.finish_reason == frame_pb.FINISH_REASON_ABORT
        assert call.finished.usage.completion_tokens == 1
        await mesh.quiet()


async def test_R13_abort_says_which_stages_did_not_confirm_and_the_place_is_kept_until_they_do(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        writer.confirms_aborts = False
        call = mesh.generate(request_id="r")
        task = await writer.next_task()
        (result,) = await abort(mesh, "r", timeout_s=0.1)
        assert result.outcome == UNCONFIRMED
        assert list(result.unconfirmed_stages) == ["writer"]
        await call.rest()
        assert call.finished.finish_reason == frame_pb.FINISH_REASON_ABORT
        assert mesh.inflight == 1
        task.confirm_abort()
        await mesh.quiet()


async def test_R13_abort_of_some_leaves_the_others_alone_and_reports_unknown_ids(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        calls = {name: mesh.generate(name, request_id=name) for name in "abcd"}
        tasks = {(t := await writer.next_task()).submit.request_id: t for _ in calls}
        results = await abort(mesh, "b", "nobody", "d", "b")
        assert [r.outcome for r in results] == [ABORTED, UNKNOWN, ABORTED, ABORTED]
        for name in "ac":
            tasks[name].tokens([1], name)
            tasks[name].finish()
            await calls[name].rest()
            assert calls[name].text() == name
            assert calls[name].finished.finish_reason == frame_pb.FINISH_REASON_COMPLETE
        await mesh.quiet()


async def test_R13_abort_while_no_replica_is_there_wins(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        call = mesh.generate(request_id="r")
        await eventually(lambda: mesh.gateway.pools.of("demo", "writer").waiting == 1)
        (result,) = await abort(mesh, "r")
        assert result.outcome == ABORTED
        await call.rest()
        assert call.finished.finish_reason == frame_pb.FINISH_REASON_ABORT
        writer = await mesh.add("writer")
        probe = mesh.generate(request_id="probe")
        assert (await writer.next_task()).submit.request_id == "probe"
        probe.cancel()
        await mesh.quiet()


async def test_abort_between_stages_stops_the_rest(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER, PAINTER]) as mesh:
        writer, painter = await mesh.add("writer"), await mesh.add("painter")
        call = mesh.generate(request_id="r")
        task = await writer.next_task()
        task.tokens([1], "caption")
        task.finish()
        picture = await painter.next_task()
        picture.progress(1, 20)
        await abort(mesh, "r")
        await call.rest()
        assert [(s.stage, s.finished.finish_reason) for s in call.finished.stages] == [
            ("writer", frame_pb.FINISH_REASON_STOP),
            ("painter", frame_pb.FINISH_REASON_ABORT),
        ]
        await mesh.quiet()


async def test_a_finish_that_crosses_the_abort_is_delivered(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        writer.confirms_aborts = False
        call = mesh.generate(request_id="r")
        task = await writer.next_task()
        asking = asyncio.create_task(abort(mesh, "r"))
        await task.aborted()
        task.tokens([1], "all of it")
        task.finish()
        (result,) = await asking
        assert result.outcome == ABORTED
        await call.rest()
        assert call.text() == "all of it"
        assert call.finished.finish_reason == frame_pb.FINISH_REASON_COMPLETE


@pytest.mark.parametrize("moment", ["waiting", "submitted", "streaming"])
async def test_a_client_that_leaves_stops_its_request_everywhere(tmp_path: Path, moment: str) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer") if moment != "waiting" else None
        call = mesh.generate()
        pool = mesh.gateway.pools.of("demo", "writer")
        if writer is None:
            await eventually(lambda: pool.waiting == 1)
            call.cancel()
            await eventually(lambda: pool.waiting == 0)
        else:
            task = await writer.next_task()
            if moment == "streaming":
                task.tokens([1], "a")
                await call.next()
            call.cancel()
            await task.aborted()
        await mesh.quiet()


async def test_an_error_of_one_output_stage_stops_the_other(tmp_path: Path) -> None:
    stages = [WRITER, PAINTER, {"name": "critic", "stage_type": "llm", "inputs": ["writer"], "final_output": True}]
    async with cluster(tmp_path, stages) as mesh:
        writer, painter, critic = [await mesh.add(name) for name in ("writer", "painter", "critic")]
        call = mesh.generate()
        (await writer.next_task()).finish()
        picture, review = await painter.next_task(), await critic.next_task()
        review.fail(MeshError(Reason.STAGE_FAILED, "no opinion"))
        error = await call.error()
        assert (error.reason, error.metadata["stage"]) == (Reason.STAGE_FAILED, "critic")
        await picture.aborted()
        await mesh.quiet()


@pytest.mark.parametrize(
    ("ids", "timeout_s", "text"),
    [([], None, "request_ids: 0"), (["x"] * 1001, None, "request_ids: 1001"), (["x"], 100.0, "timeout: 100.0")],
)
async def test_bad_aborts_name_the_field(tmp_path: Path, ids: list[str], timeout_s: float | None, text: str) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        request = inference_pb.AbortRequestRequest(request_ids=ids)
        if timeout_s is not None:
            request.timeout.CopyFrom(duration_pb2.Duration(seconds=int(timeout_s)))
        with pytest.raises(grpc.RpcError) as caught:
            await mesh.stub.AbortRequest(request)
        assert text in MeshError.from_rpc_error(caught.value).message


async def test_a_head_that_stops_lets_requests_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate()
        task = await writer.next_task()
        draining = asyncio.create_task(mesh.gateway.drain(10.0))
        await asyncio.sleep(0)
        assert (await mesh.generate().error()).reason is Reason.DRAINING
        task.tokens([1], "to the end")
        task.finish()
        await call.rest()
        assert call.text() == "to the end"
        assert await draining == 0


async def test_a_head_that_stops_ends_what_does_not_finish_in_time(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate()
        task = await writer.next_task()
        assert await mesh.gateway.drain(0.05) == 1
        assert (await call.error()).reason is Reason.DRAINING
        await task.aborted()

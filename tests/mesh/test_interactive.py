"""Interactive requests: a prompt that goes on while its stage runs."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from stagemesh.rpc.errors import Reason
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_head.services import inference
from tests.mesh.harness import WRITER, Call, Cluster, cluster, eventually, llm
from tests.mesh.scripted_stage import WAIT_S, ScriptedTask


async def next_append(task: ScriptedTask) -> stage_pb.AppendInput:
    async with asyncio.timeout(WAIT_S):
        return await task.appends.get()


class Interactive(Call):
    """A call whose input goes on."""

    def __init__(self, mesh: Cluster, **fields: object) -> None:
        super().__init__(mesh.stub.GenerateInteractive(timeout=WAIT_S))
        self.request = inference_pb.GenerateRequest(prompt=prompt_pb.Prompt(text="first"), **fields)  # type: ignore[arg-type]

    async def open(self) -> None:
        await self.call.write(inference_pb.GenerateInteractiveRequest(open=self.request))

    async def append(self, text: str, **fields: object) -> None:
        prompt = prompt_pb.Prompt(text=text)
        await self.call.write(inference_pb.GenerateInteractiveRequest(append=prompt, **fields))  # type: ignore[arg-type]

    async def close_input(self) -> None:
        await self.call.done_writing()


async def test_R12_interactive_chunks_reach_the_stage_in_order_and_the_end_closes_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        call = Interactive(mesh, request_id="chat")
        await call.open()
        task = await writer.next_task()
        assert (task.submit.prompt.text, task.submit.more_input) == ("first", True)
        task.tokens([1], "one")
        assert (await call.next()).frame.text.text == "one"
        await call.append("second", params=llm("writer", max_tokens=5).params)
        append = await next_append(task)
        assert (append.prompt.text, append.params.llm.max_tokens, append.last) == ("second", 5, False)
        task.tokens([2], "two")
        await call.close_input()
        append = await next_append(task)
        assert append.last
        assert not append.HasField("prompt")
        task.finish()
        await call.rest()
        assert call.text() == "onetwo"
        assert call.responses[0].request_id == "chat"
        await mesh.quiet()


async def test_interactive_chunks_that_came_before_a_replica_are_not_lost(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        call = Interactive(mesh)
        await call.open()
        await call.append("second")
        await call.close_input()
        run_started = mesh.gateway.pools.of("demo", "writer")
        await eventually(lambda: run_started.waiting == 1)
        writer = await mesh.add("writer")
        task = await writer.next_task()
        assert (await next_append(task)).prompt.text == "second"
        assert (await next_append(task)).last
        task.finish()
        await call.rest()


async def test_interactive_input_is_replayed_when_the_replica_is_lost_before_output(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        replicas = [await mesh.add("writer", replica_id) for replica_id in range(2)]
        call = Interactive(mesh)
        await call.open()
        await eventually(lambda: any(r.has_arrivals for r in replicas))
        first = next(r for r in replicas if r.has_arrivals)
        task = await first.next_task()
        await call.append("second")
        await next_append(task)
        await first.crash()
        again = await next(r for r in replicas if r is not first).next_task()
        assert (await next_append(again)).prompt.text == "second"
        again.finish()
        await call.rest()


async def test_R12_interactive_requests_refuse_what_engines_cannot_do(tmp_path: Path) -> None:
    async with cluster(tmp_path, [{**WRITER, "limits": {"max_prompt_bytes": 100}}]) as mesh:
        writer = await mesh.add("writer")
        for fields, text in [
            ({"output_mode": inference_pb.OUTPUT_MODE_FINAL_ONLY}, "output_mode: 'FINAL_ONLY'"),
            ({"sampling": [llm("writer", n=2)]}, "sampling[writer].n: 2"),
            ({"sampling": [llm("writer", stop=["x"])]}, "sampling[writer].stop"),
        ]:
            call = Interactive(mesh, **fields)
            await call.open()
            error = await call.error()
            assert error.reason is Reason.INVALID_REQUEST
            assert text in error.message
        assert writer.submitted == []
        for append, reason, text in [
            ({"text": ""}, Reason.INVALID_REQUEST, "append.text: ''"),
            ({"text": "x" * 99}, Reason.PROMPT_TOO_LARGE, "append: "),
            ({"text": "y", "params": llm("", top_p=0).params}, Reason.INVALID_REQUEST, "params.top_p: 0.0"),
        ]:
            call = Interactive(mesh)
            await call.open()
            task = await writer.next_task()
            await call.append(**append)
            error = await call.error()
            assert (error.reason, text in error.message) == (reason, True), error.message
            await task.aborted()
        call = Interactive(mesh)
        await call.append("no open")
        assert "must have `open`" in (await call.error()).message
        await mesh.quiet()


async def test_R12_an_update_for_a_finished_request_is_dropped_and_resurrects_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        call = Interactive(mesh)
        await call.open()
        (await writer.next_task()).finish()
        await call.rest()
        with contextlib.suppress(asyncio.InvalidStateError):  # the call is over
            await call.append("too late")
        await mesh.quiet()
        assert len(writer.submitted) == 1


async def test_an_interactive_call_that_says_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "FIRST_MESSAGE_S", 0.05)
    async with cluster(tmp_path, [WRITER]) as mesh:
        error = await Interactive(mesh).error()
        assert error.reason is Reason.INVALID_REQUEST and "no first message within 0.05 s" in error.message
        await mesh.quiet()

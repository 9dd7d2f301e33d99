"""Edges of mode stream: a stage that starts at the first chunk of the one before, and the credit between them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stagemesh.rpc.errors import Reason
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh_head.links.release import TensorReleaser
from stagemesh_head.orchestration.edges import WINDOW_UNITS
from tests.mesh.harness import Cluster, cluster, eventually, llm
from tests.mesh.scripted_stage import WAIT_S, ScriptedTask

THINKER = {"name": "thinker", "stage_type": "llm"}
TALKER = {"name": "talker", "stage_type": "llm", "inputs": ["thinker"], "edge": "stream", "final_output": True}
CHAIN = [THINKER, TALKER]
GREEDY = [llm("thinker", temperature=0), llm("talker", temperature=0)]


async def next_append(task: ScriptedTask) -> stage_pb.AppendInput:
    async with asyncio.timeout(WAIT_S):
        return await task.appends.get()


async def rest_of_input(task: ScriptedTask) -> str:
    """Text of all further chunks, to the last."""
    text = ""
    while True:
        append = await next_append(task)
        text += append.chunk.text
        if append.last:
            return text


async def test_R9_a_consumer_starts_at_the_first_chunk_and_is_fed_as_it_goes(tmp_path: Path) -> None:
    async with cluster(tmp_path, CHAIN) as mesh:
        thinker, talker = await mesh.add("thinker"), await mesh.add("talker")
        call = mesh.generate()
        thought = await thinker.next_task()
        assert thought.submit.credit == WINDOW_UNITS
        assert mesh.gateway.pools.of("demo", "talker").inflight == 1  # bound early
        thought.tokens([1], "a")
        speech = await talker.next_task()
        assert speech.submit.more_input
        assert [i.text for i in speech.submit.inputs] == ["a"]
        speech.tokens([7], "A")
        thought.tokens([2], "b")
        append = await next_append(speech)
        assert (append.chunk.stage, append.chunk.text, list(append.chunk.token_ids), append.last) == (
            "thinker",
            "b",
            [2],
            False,
        )
        thought.finish()
        assert (await next_append(speech)).last
        speech.finish()
        await call.rest()
        assert call.text("talker") == "A"
        await mesh.quiet()


async def test_a_producer_that_says_nothing_still_starts_its_consumer(tmp_path: Path) -> None:
    async with cluster(tmp_path, CHAIN) as mesh:
        thinker, talker = await mesh.add("thinker"), await mesh.add("talker")
        call = mesh.generate()
        (await thinker.next_task()).finish()
        speech = await talker.next_task()
        assert [(i.text, i.finished) for i in speech.submit.inputs] == [("", True)]
        assert not speech.submit.more_input
        speech.finish()
        await call.rest()


async def test_R9_a_missing_consumer_stage_fails_the_request_before_its_input_is_complete(tmp_path: Path) -> None:
    async with cluster(tmp_path, CHAIN) as mesh:
        thinker = await mesh.add("thinker")
        call = mesh.generate(timeout=0.5)
        thought = await thinker.next_task()
        error = await call.error()
        assert (error.reason, error.metadata["stage"]) == (Reason.NO_LIVE_REPLICA, "talker")
        await thought.aborted()
        await mesh.quiet()


async def test_a_producer_gets_credit_as_its_consumer_takes_chunks(tmp_path: Path) -> None:
    async with cluster(tmp_path, CHAIN) as mesh:
        thinker, talker = await mesh.add("thinker"), await mesh.add("talker")
        call = mesh.generate()
        thought = await thinker.next_task()
        thought.tokens([1, 2, 3], "abc")
        speech = await talker.next_task()
        assert thought.grants.empty()
        speech.started()
        async with asyncio.timeout(WAIT_S):
            assert await thought.grants.get() == 3
        thought.tokens([4, 5], "de")
        await next_append(speech)
        assert thought.grants.empty()
        speech.took(1)
        async with asyncio.timeout(WAIT_S):
            assert await thought.grants.get() == 2
        call.cancel()
        await mesh.quiet()


async def test_a_lost_consumer_gets_everything_again(tmp_path: Path) -> None:
    async with cluster(tmp_path, CHAIN) as mesh:
        thinker = await mesh.add("thinker")
        talkers = [await mesh.add("talker", replica_id) for replica_id in range(2)]
        call = mesh.generate(sampling=GREEDY)
        thought = await thinker.next_task()
        thought.tokens([1], "a")
        await eventually(lambda: any(t.has_arrivals for t in talkers))
        first = next(t for t in talkers if t.has_arrivals)
        speech = await first.next_task()
        thought.tokens([2], "b")
        await next_append(speech)
        await first.crash()
        again = await next(t for t in talkers if t is not first).next_task()
        assert "".join(i.text for i in again.submit.inputs) == "ab"
        thought.tokens([3], "c")
        thought.finish()
        assert await rest_of_input(again) == "c"
        again.tokens([9], "ABC")
        again.finish()
        await call.rest()
        assert call.text("talker") == "ABC"
        await mesh.quiet()


async def test_a_producer_that_resumes_exactly_does_not_disturb_its_consumer(tmp_path: Path) -> None:
    async with cluster(tmp_path, CHAIN) as mesh:
        thinkers = [await mesh.add("thinker", replica_id) for replica_id in range(2)]
        talker = await mesh.add("talker")
        call = mesh.generate(sampling=GREEDY)
        await eventually(lambda: any(t.has_arrivals for t in thinkers))
        first = next(t for t in thinkers if t.has_arrivals)
        thought = await first.next_task()
        thought.tokens([1], "a")
        speech = await talker.next_task()
        await first.crash()
        again = await next(t for t in thinkers if t is not first).next_task()
        assert list(again.submit.resume_token_ids) == [1]
        again.tokens([2], "b")
        again.finish()
        assert await rest_of_input(speech) == "b"
        speech.finish()
        await call.rest()
        assert len(talker.submitted) == 1


async def test_a_producer_that_starts_anew_starts_its_consumer_anew(tmp_path: Path) -> None:
    async with cluster(tmp_path, CHAIN) as mesh:
        thinkers = [await mesh.add("thinker", replica_id) for replica_id in range(2)]
        talker = await mesh.add("talker")
        sampling = [llm("thinker", temperature=0, presence_penalty=1.0)]
        call = mesh.generate(sampling=sampling)
        await eventually(lambda: any(t.has_arrivals for t in thinkers))
        first = next(t for t in thinkers if t.has_arrivals)
        thought = await first.next_task()
        thought.tokens([1], "a")
        speech = await talker.next_task()
        await first.crash()
        await speech.aborted()
        again = await next(t for t in thinkers if t is not first).next_task()
        assert list(again.submit.resume_token_ids) == []
        again.tokens([5], "x")
        fresh = await talker.next_task()
        assert [i.text for i in fresh.submit.inputs] == ["x"]
        again.finish()
        await rest_of_input(fresh)
        fresh.tokens([6], "X")
        fresh.finish()
        await call.rest()
        assert call.text("talker") == "X"
        assert {s.stage: s.finished.recovery for s in call.finished.stages} == {
            "thinker": "restarted",
            "talker": "restarted",
        }
        await mesh.quiet()


async def test_a_producer_cannot_start_anew_once_its_consumers_output_was_delivered(tmp_path: Path) -> None:
    async with cluster(tmp_path, CHAIN) as mesh:
        thinkers = [await mesh.add("thinker", replica_id) for replica_id in range(2)]
        talker = await mesh.add("talker")
        call = mesh.generate(sampling=[llm("thinker", temperature=0, presence_penalty=1.0)])
        await eventually(lambda: any(t.has_arrivals for t in thinkers))
        first = next(t for t in thinkers if t.has_arrivals)
        thought = await first.next_task()
        thought.tokens([1], "a")
        speech = await talker.next_task()
        speech.tokens([7], "A")
        await call.next()
        await first.crash()
        error = await call.error()
        assert (error.reason, error.metadata["stage"]) == (Reason.STAGE_LOST, "talker")
        await speech.aborted()
        await mesh.quiet()


async def test_a_consumer_reads_two_producers_as_they_go(tmp_path: Path) -> None:
    other = {"name": "looker", "stage_type": "llm", "inputs": []}
    both = {**TALKER, "inputs": ["thinker", "looker"]}
    async with cluster(tmp_path, [THINKER, other, both]) as mesh:
        thinker, looker, talker = [await mesh.add(name) for name in ("thinker", "looker", "talker")]
        call = mesh.generate()
        thought, view = await thinker.next_task(), await looker.next_task()
        thought.tokens([1], "a")
        speech = await talker.next_task()
        view.tokens([2], "v")
        assert (await next_append(speech)).chunk.stage == "looker"
        thought.finish()
        append = await next_append(speech)
        assert (append.chunk.stage, append.chunk.finished, append.last) == ("thinker", True, False)
        view.finish()
        assert (await next_append(speech)).last
        speech.finish()
        await call.rest()


def pieces_of(mesh: Cluster, request_id: str, stage: str) -> list[str]:
    """What the head has of a stage's tensors, by key; empty where it let go of one."""
    output = mesh.gateway.orchestrator._runs[request_id].machine.tasks[stage].output
    return [piece.tensor.value.ref.key for piece in output.pieces]


def send_tensor(task: ScriptedTask, key: str) -> None:
    task.tensor("hidden", tensor_pb.TensorRef(endpoint="127.0.0.1:1", key=key, dtype="float32", shape=[4]))


async def test_tensors_of_a_stream_are_let_go_of_as_a_reader_that_cannot_begin_anew_reads_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []
    monkeypatch.setattr(TensorReleaser, "release", lambda _, refs, after_s: released.extend(r.key for r in refs))
    async with cluster(tmp_path, CHAIN) as mesh:
        thinker, talker = await mesh.add("thinker"), await mesh.add("talker")
        call = mesh.generate(request_id="r")
        thought = await thinker.next_task()
        send_tensor(thought, "k0")
        speech = await talker.next_task()
        speech.started()
        for key in ("k1", "k2", "k3"):
            send_tensor(thought, key)
            await next_append(speech)
        speech.took(1)
        await eventually(lambda: thought.grants.qsize() == 2)
        # Nothing was delivered yet: a lost talker would want all of it again.
        assert (pieces_of(mesh, "r", "thinker"), released) == (["k0", "k1", "k2", "k3"], [])
        speech.media(b"sound")
        speech.text(text="said")
        speech.took(1)
        # It says that it takes k2 before it reads it.
        await eventually(lambda: pieces_of(mesh, "r", "thinker") == ["", "", "k2", "k3"])
        assert released == ["k0", "k1"]
        thought.finish()
        speech.finish()
        await call.rest()
        await mesh.quiet()
        assert released == ["k0", "k1", "k2", "k3"], "each of them once"


async def test_tensors_of_a_stream_are_kept_for_a_reader_that_could_begin_anew(tmp_path: Path) -> None:
    async with cluster(tmp_path, CHAIN) as mesh:
        thinker = await mesh.add("thinker")
        talkers = [await mesh.add("talker", replica_id) for replica_id in range(2)]
        call = mesh.generate(request_id="r", sampling=GREEDY)
        thought = await thinker.next_task()
        send_tensor(thought, "k0")
        await eventually(lambda: any(t.has_arrivals for t in talkers))
        first = next(t for t in talkers if t.has_arrivals)
        speech = await first.next_task()
        speech.started()
        send_tensor(thought, "k1")
        await next_append(speech)
        speech.tokens([7], "A")
        speech.took(1)
        await eventually(lambda: thought.grants.qsize() == 2)
        await first.crash()
        again = await next(t for t in talkers if t is not first).next_task()
        assert [t.value.ref.key for i in again.submit.inputs for t in i.tensors] == ["k0", "k1"]
        call.cancel()
        await mesh.quiet()

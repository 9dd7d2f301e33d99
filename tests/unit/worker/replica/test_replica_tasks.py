"""Tasks on a whole replica process with the synthetic engine."""

from __future__ import annotations

from pathlib import Path

import grpc
import psutil
import pytest
from replica_harness import reason_of

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_worker.replica import control


async def test_abort_is_confirmed_and_the_slot_is_free_again(start_replica) -> None:
    replica = await (await start_replica(engine_args={"tokens_per_second": 20, "tokens": 10_000})).ready()
    link = await replica.link()
    await link.submit(1)
    await link.until(lambda link: len(link.token_ids(1)) > 2)
    await link.send(aborts=[stage_pb.AbortTask(slot=1, reason="test")])
    assert (await link.end_of(1)).aborted.usage.completion_tokens >= 3
    link.responses.clear()
    await link.submit(1, llm={"max_tokens": 2})
    assert (await link.end_of(1)).HasField("finished")
    await link.close()


async def test_abort_in_the_same_message_as_its_submission_wins(start_replica) -> None:
    replica = await (await start_replica(engine_args={"tokens_per_second": 1})).ready()
    link = await replica.link()
    task = stage_pb.SubmitTask(slot=1, request_id="r")
    task.prompt.text = "never begun"
    await link.send(submits=[task], aborts=[stage_pb.AbortTask(slot=1)])
    assert (await link.end_of(1)).HasField("aborted")
    assert not link.token_ids(1)
    await link.close()


async def test_one_bad_task_leaves_the_others_alone(start_replica) -> None:
    replica = await (await start_replica(engine_args={"fail_on": "poison", "tokens": 30})).ready()
    link = await replica.link()
    for slot in range(1, 21):
        await link.submit(slot, "poison" if slot % 2 else f"prompt {slot}")
    for slot in range(1, 21):
        event = await link.end_of(slot)
        if slot % 2:
            assert reason_of(event) == Reason.STAGE_FAILED
            assert MeshError.from_status(event.failed).metadata["stage"] == "writer"
        else:
            assert len(link.token_ids(slot)) == 30
    await link.close()


async def test_bad_sampling_value_names_its_field(start_replica) -> None:
    replica = await (await start_replica()).ready()
    link = await replica.link()
    await link.submit(1, llm={"temperature": -1.0})
    error = MeshError.from_status((await link.end_of(1)).failed)
    assert error.reason == Reason.INVALID_REQUEST and error.metadata["field"] == "temperature"
    await link.close()


async def test_deadline_ends_a_task(start_replica) -> None:
    replica = await (await start_replica(engine_args={"tokens_per_second": 1, "tokens": 100})).ready()
    link = await replica.link()
    task = stage_pb.SubmitTask(slot=1, request_id="r")
    task.prompt.text = "slow"
    task.time_left.FromMilliseconds(200)
    await link.send(submits=[task])
    assert reason_of(await link.end_of(1)) == Reason.REQUEST_TIMEOUT
    await link.close()


async def test_slow_consumer_is_sent_no_more_than_its_credit(start_replica) -> None:
    replica = await (await start_replica(engine_args={"tokens": 50})).ready()
    link = await replica.link()
    await link.submit(1, credit=8)
    await link.submit(2)  # another one, unlimited, shows that time has passed
    await link.end_of(2)
    granted = 8
    while link.ending(1) is None:
        await link.until(lambda link, granted=granted: len(link.token_ids(1)) == min(granted, 50))
        if granted >= 50:
            await link.end_of(1)
            break
        granted += 7
        await link.send(credits=[stage_pb.GrantCredit(slot=1, units=7)])
    assert len(link.token_ids(1)) == 50
    await link.close()


async def test_further_input_is_taken_chunk_by_chunk(start_replica) -> None:
    replica = await (await start_replica(engine_args={"tokens": 3})).ready()
    link = await replica.link()
    await link.submit(1, "first", more_input=True)
    for number in range(3):
        chunk = stage_pb.AppendInput(slot=1, last=number == 2)
        chunk.prompt.text = f"chunk {number}"
        await link.send(appends=[chunk])
    await link.end_of(1)
    assert sum(event.input_taken.chunks for event in link.events(1, "input_taken")) == 3
    assert len(link.token_ids(1)) == 12
    await link.close()


async def test_input_after_the_last_chunk_fails_the_task_only(start_replica) -> None:
    replica = await (await start_replica(engine_args={"tokens_per_second": 1, "tokens": 1000})).ready()
    link = await replica.link()
    await link.submit(1)
    await link.submit(2, llm={"max_tokens": 1})
    await link.send(appends=[stage_pb.AppendInput(slot=1, last=True), stage_pb.AppendInput(slot=77)])
    assert reason_of(await link.end_of(1)) == Reason.INVALID_REQUEST
    assert (await link.end_of(2)).HasField("finished")
    await link.close()


async def test_reused_slot_of_a_running_task_breaks_the_stream_with_areason_of(start_replica) -> None:
    replica = await (await start_replica(engine_args={"tokens_per_second": 1})).ready()
    link = await replica.link()
    await link.submit(1)
    await link.submit(1)
    code, details = await link.end_of_stream()
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "slot" in details


async def test_end_of_a_link_aborts_its_tasks_and_no_others(start_replica) -> None:
    replica = await (await start_replica(engine_args={"tokens_per_second": 50, "tokens": 100_000})).ready()
    leaving, staying = await replica.link(), await replica.link()
    for slot in range(1, 6):
        await leaving.submit(slot)
    await staying.submit(1)
    await staying.until(lambda link: any(response.load.running == 6 for response in link.responses))
    await leaving.close()
    await staying.until(lambda link: link.responses[-1].HasField("load") and link.responses[-1].load.running == 1)
    await staying.close()


async def test_picture_comes_with_its_steps_and_is_the_same_for_the_same_seed(start_replica) -> None:
    replica = await (await start_replica(stage_type="diffusion", name="painter", model="none")).ready()
    link = await replica.link()
    for slot in (1, 2):
        task = stage_pb.SubmitTask(slot=slot, request_id=f"r{slot}")
        task.prompt.text = "a red circle"
        task.params.diffusion.num_inference_steps = 5
        task.params.diffusion.seed = 7
        await link.send(submits=[task])
    pictures = []
    for slot in (1, 2):
        finished = (await link.end_of(slot)).finished
        assert (finished.usage.diffusion_steps, finished.usage.images) == (5, 1)
        assert [event.progress.step for event in link.events(slot, "progress")] == [1, 2, 3, 4, 5]
        pictures.append(link.events(slot, "media")[0].media)
    assert pictures[0] == pictures[1] and pictures[0].data.startswith(b"\x89PNG")
    await link.close()


async def test_large_tensor_stays_here_and_is_named_by_reference(start_replica) -> None:
    replica = await start_replica(final_output_type="latent", engine_args={"tensor_shape": [64, 1024]})
    await replica.ready()
    link = await replica.link()
    await link.submit(1)
    await link.end_of(1)
    ref = link.events(1, "tensor")[0].tensor.value.ref
    assert (ref.endpoint, ref.owner_incarnation, list(ref.shape)) == (replica.endpoint, "first", [64, 1024])
    assert Path(f"/dev/shm/{ref.shared_memory}").exists()
    await link.close()
    await replica.tell(control.Stop())
    assert await replica.exit_code() == 0
    assert not Path(f"/dev/shm/{ref.shared_memory}").exists()


async def test_tensor_of_one_replica_is_the_input_of_the_next(start_replica) -> None:
    """By reference and by shared memory, through the adapter, into the other engine."""
    producer = await start_replica(final_output_type="latent", engine_args={"tensor_shape": [64, 1024]})
    consumer = await start_replica(name="reader", inputs=["writer"], engine_args={"tokens": 3})
    await producer.ready()
    await consumer.ready()
    link, reader = await producer.link(), await consumer.link()
    await link.submit(1)
    await link.end_of(1)
    tensor = link.events(1, "tensor")[0].tensor
    upstream = stage_pb.UpstreamOutput(stage="writer", tensors=[tensor], finished=True)
    await reader.submit(1, inputs=[upstream])
    finished = (await reader.end_of(1)).finished
    assert finished.usage.prompt_tokens == 64
    assert finished.timings.HasField("transfer")
    await link.close()
    await reader.close()


@pytest.mark.parametrize("ends", ["aborted", "failed"])
async def test_input_of_a_task_that_broke_off_is_let_go_at_once(start_replica, ends: str) -> None:
    """A mapping is a descriptor, and memory that its owner has released."""
    producer = await start_replica(final_output_type="latent", engine_args={"tensor_shape": [64, 1024]})
    consumer = await start_replica(name="reader", inputs=["writer"], engine_args={"tokens_per_second": 1})
    await producer.ready()
    await consumer.ready()
    link, reader = await producer.link(), await consumer.link()
    await link.submit(1)
    await link.end_of(1)
    upstream = stage_pb.UpstreamOutput(stage="writer", tensors=[link.events(1, "tensor")[0].tensor], finished=True)
    before = psutil.Process(consumer.process.pid).num_fds()
    for slot in range(1, 9):
        await reader.submit(slot, inputs=[upstream], llm={"top_p": 7.0} if ends == "failed" else {})
        if ends == "aborted":
            await reader.until(lambda link, slot=slot: bool(link.events(slot, "started")))
            await reader.send(aborts=[stage_pb.AbortTask(slot=slot)])
        assert (await reader.end_of(slot)).WhichOneof("event") == ends
    # Fewer, when Python meanwhile found the self-probe's connection among its circles.
    assert psutil.Process(consumer.process.pid).num_fds() <= before
    await link.close()
    await reader.close()


async def test_nothing_from_the_stage_before_gives_an_empty_output(start_replica) -> None:
    replica = await (await start_replica(name="reader", inputs=["writer"])).ready()
    link = await replica.link()
    await link.submit(1, inputs=[stage_pb.UpstreamOutput(stage="writer", finished=True)])
    assert (await link.end_of(1)).finished.usage.completion_tokens == 0
    assert not link.token_ids(1)
    await link.close()


async def test_stream_edge_starts_at_its_first_chunk_with_content(start_replica) -> None:
    replica = await start_replica(name="reader", inputs=["writer"], edge="stream", engine_args={"tokens": 2})
    await replica.ready()
    link = await replica.link()
    await link.submit(1, more_input=True)
    for text, last in (("", False), ("one ", False), ("two ", False), ("", True)):
        output = stage_pb.UpstreamOutput(stage="writer", text=text, finished=last)
        await link.send(appends=[stage_pb.AppendInput(slot=1, chunk=output, last=last)])
    await link.end_of(1)
    assert len(link.token_ids(1)) == 4
    assert sum(event.input_taken.chunks for event in link.events(1, "input_taken")) == 4
    await link.close()


async def test_resume_goes_on_where_the_other_replica_was_lost(start_replica) -> None:
    first = await (await start_replica(engine_args={"tokens": 40})).ready()
    link = await first.link()
    await link.submit(1, "a tale")
    await link.end_of(1)
    ids, text = link.token_ids(1), link.text(1)
    await link.close()
    second = await (await start_replica(engine_args={"tokens": 40})).ready()
    link = await second.link()
    delivered = " ".join(text.split(" ")[:15]) + " "
    await link.submit(1, "a tale", attempt=2, resume_token_ids=ids[:17], resume_text_chars=len(delivered))
    await link.end_of(1)
    assert ids[:17] + link.token_ids(1) == ids
    assert delivered + link.text(1) == text
    await link.close()


async def test_storm_of_cancelled_tasks_leaves_nothing_running(start_replica) -> None:
    replica = await (await start_replica(engine_args={"tokens_per_second": 100, "tokens": 10_000})).ready()
    link = await replica.link()
    for _ in range(20):
        await link.send(submits=[_task(slot) for slot in range(1, 51)])
        await link.send(aborts=[stage_pb.AbortTask(slot=slot) for slot in range(1, 51)])
        for slot in range(1, 51):
            assert (await link.end_of(slot)).HasField("aborted")
        link.responses.clear()
    load = await replica.until(control.Load)
    while load.running:
        load = await replica.until(control.Load)
    await link.submit(1, llm={"max_tokens": 3})
    assert (await link.end_of(1)).HasField("finished")
    await link.close()


def _task(slot: int) -> stage_pb.SubmitTask:
    task = stage_pb.SubmitTask(slot=slot, request_id=f"storm-{slot}")
    task.prompt.text = f"prompt {slot}"
    return task

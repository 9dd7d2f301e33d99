"""A whole replica process with the synthetic engine, from its assignment to its end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import grpc
import psutil
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import open_channel
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import stage_pb2_grpc as stage_grpc
from stagemesh_worker.replica import control


def _reason(event: stage_pb.TaskEvent) -> Reason:
    assert event.HasField("failed"), event
    return MeshError.from_status(event.failed).reason


async def test_replica_serves_a_task_after_it_said_ready(start_replica) -> None:
    replica = await (await start_replica(engine_args={"tokens": 12})).ready()
    assert [type(message) for message in replica.messages] == [control.Phase, control.Phase, control.Ready]
    link = await replica.link()
    await link.submit(1, "hello")
    finished = (await link.end_of(1)).finished
    assert finished.finish_reason == frame_pb.FINISH_REASON_STOP
    assert finished.usage.completion_tokens == 12
    assert len(link.token_ids(1)) == 12
    assert len(link.text(1).split()) == 12
    assert len(link.events(1, "started")) == 1
    await link.close()


async def test_process_is_named_bound_to_its_cores_and_given_its_variables(start_replica) -> None:
    replica = await (await start_replica(runtime={"env": {"MY_SETTING": "7"}})).ready()
    process = psutil.Process(replica.process.pid)
    assert process.cmdline()[0].startswith("stagemesh: writer/0 (shapes)")
    assert os.sched_getaffinity(replica.process.pid) == {0}
    for line in Path(f"/proc/{replica.process.pid}/task").glob("*/status"):
        assert "Cpus_allowed_list:\t0\n" in line.read_text()


async def test_stop_ends_the_process_at_once_with_nothing_left(start_replica) -> None:
    replica = await (await start_replica()).ready()
    await replica.tell(control.Stop())
    assert await replica.exit_code() == 0


async def test_agent_that_goes_away_ends_the_replica(start_replica) -> None:
    replica = await (await start_replica()).ready()
    replica.writer.close()
    assert await replica.exit_code() == 0


async def test_sigterm_stops_it_cleanly(start_replica) -> None:
    replica = await (await start_replica()).ready()
    replica.process.send_signal(signal.SIGTERM)
    assert await replica.exit_code() == 0


async def test_stop_interrupts_a_slow_start(start_replica) -> None:
    replica = await start_replica(engine_args={"start_seconds": 60})
    while (await replica.until(control.Phase)).phase != "loading nothing":
        pass
    await replica.tell(control.Stop())
    assert await replica.exit_code() == 0


async def test_failed_start_is_reported_with_the_engines_words(start_replica) -> None:
    replica = await start_replica(engine_args={"crash_on_start": "out of imaginary memory"})
    failed = await replica.until(control.Failed)
    assert failed == control.Failed("START_FAILED", "RuntimeError: out of imaginary memory", fatal=False)
    assert await replica.exit_code() == control.EXIT_FAILED


async def test_unknown_engine_argument_is_fatal_and_has_a_hint(start_replica) -> None:
    replica = await start_replica(engine_args={"tokens_per_secund": 3})
    failed = await replica.until(control.Failed)
    assert (failed.reason, failed.fatal) == ("BAD_STAGE_CONFIG", True)
    assert "engine_args.tokens_per_secund" in failed.message and "tokens_per_second" in failed.message
    assert await replica.exit_code() == control.EXIT_FAILED


async def test_unknown_engine_is_fatal_and_lists_the_known_ones(start_replica) -> None:
    replica = await start_replica(engine="synthetik")
    failed = await replica.until(control.Failed)
    assert failed.fatal and "diffusion, synthetic, vllm" in failed.message and "synthetic" in failed.message


async def test_adapter_that_leads_nowhere_is_fatal(start_replica) -> None:
    replica = await start_replica(input_adapter="no.such.module.adapter")
    failed = await replica.until(control.Failed)
    assert failed.fatal and "no.such.module" in failed.message


async def test_self_probe_that_fails_is_a_failed_start(start_replica) -> None:
    replica = await start_replica(engine_args={"fail_on": "hello"})
    failed = await replica.until(control.Failed)
    assert failed.reason == "START_FAILED" and "self-probe failed" in failed.message


async def test_another_incarnation_is_refused(start_replica) -> None:
    replica = await (await start_replica()).ready()
    replica.reference.incarnation = "an earlier one"
    stub = stage_grpc.StageServiceStub(open_channel(replica.endpoint))
    call = stub.Execute(iter([stage_pb.ExecuteRequest(open=stage_pb.OpenLink(replica=replica.reference))]))
    try:
        await call.read()
        raise AssertionError("it was not refused")
    except grpc.aio.AioRpcError as error:
        assert MeshError.from_rpc_error(error).reason == Reason.STALE_INCARNATION


async def test_stream_without_open_is_refused(start_replica) -> None:
    replica = await (await start_replica()).ready()
    stub = stage_grpc.StageServiceStub(open_channel(replica.endpoint))
    call = stub.Execute(iter([stage_pb.ExecuteRequest(aborts=[stage_pb.AbortTask(slot=1)])]))
    try:
        await call.read()
        raise AssertionError("it was not refused")
    except grpc.aio.AioRpcError as error:
        assert MeshError.from_rpc_error(error).reason == Reason.INVALID_REQUEST


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
            assert _reason(event) == Reason.STAGE_FAILED
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
    assert _reason(await link.end_of(1)) == Reason.REQUEST_TIMEOUT
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
    assert _reason(await link.end_of(1)) == Reason.INVALID_REQUEST
    assert (await link.end_of(2)).HasField("finished")
    await link.close()


async def test_reused_slot_of_a_running_task_breaks_the_stream_with_a_reason(start_replica) -> None:
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


async def test_drain_finishes_what_runs_and_refuses_what_comes(start_replica) -> None:
    replica = await (await start_replica(engine_args={"tokens_per_second": 50, "tokens": 40})).ready()
    link = await replica.link()
    await link.submit(1)
    await link.until(lambda link: bool(link.token_ids(1)))
    await replica.tell(control.Drain(20))
    slot = 2
    await link.submit(slot)
    while not (ending := await link.end_of(slot)).HasField("failed"):  # the order to drain is on its way
        slot += 1
        await link.submit(slot, llm={"max_tokens": 1})
    assert _reason(ending) == Reason.DRAINING
    await replica.until(control.Drained)
    assert (await link.end_of(1)).HasField("finished")
    await link.close()


async def test_drain_gives_up_after_its_grace(start_replica) -> None:
    replica = await (await start_replica(engine_args={"tokens_per_second": 1, "tokens": 1000})).ready()
    link = await replica.link()
    await link.submit(1)
    await link.until(lambda link: bool(link.token_ids(1)))
    await replica.tell(control.Drain(0.2))
    assert _reason(await link.end_of(1)) == Reason.DRAINING
    await replica.until(control.Drained)
    await link.close()


async def test_engine_death_fails_its_tasks_and_is_reported(start_replica) -> None:
    replica = await (await start_replica(engine_args={"die_after": 60, "tokens": 1000})).ready()
    link = await replica.link()
    await link.submit(1)
    assert _reason(await link.end_of(1)) == Reason.ENGINE_DEAD
    failed = await replica.until(control.Failed)
    assert (failed.reason, failed.fatal) == ("ENGINE_DEAD", False)
    assert await replica.exit_code() == control.EXIT_FAILED
    await link.close()


async def test_engine_that_stalls_with_work_is_unhealthy_and_then_given_up(start_replica) -> None:
    replica = await start_replica({"progress_timeout_s": 0.4}, engine_args={"stall_after": 20, "tokens": 1000})
    await replica.ready()
    link = await replica.link()
    await link.submit(1)
    assert "stall" in (await replica.until(control.Unhealthy)).reason
    failed = await replica.until(control.Failed)
    assert failed.reason == "ENGINE_STUCK"
    assert _reason(await link.end_of(1)) == Reason.ENGINE_STUCK
    await link.close()


async def test_paused_engine_with_work_is_not_stuck(start_replica) -> None:
    replica = await start_replica({"progress_timeout_s": 0.3}, engine_args={"tokens": 20})
    await replica.ready()
    link = await replica.link()
    stub = stage_grpc.StageServiceStub(open_channel(replica.endpoint))
    await stub.Call(stage_pb.CallRequest(method="pause"), timeout=5)
    await link.submit(1)
    for _ in range(4):
        assert isinstance(await replica.next(), control.Load)
    await stub.Call(stage_pb.CallRequest(method="resume"), timeout=5)
    assert (await link.end_of(1)).HasField("finished")
    await link.close()


async def test_load_is_reported_to_agent_and_head(start_replica) -> None:
    replica = await start_replica(engine_args={"tokens_per_second": 20, "tokens": 200, "max_num_seqs": 2})
    await replica.ready()
    link = await replica.link()
    for slot in (1, 2, 3):
        await link.submit(slot)
    load = await replica.until(control.Load)
    while (load.running, load.waiting) != (2, 1):
        load = await replica.until(control.Load)
    assert load.memory_bytes > 10 << 20
    await link.until(lambda link: any(response.load.waiting == 1 for response in link.responses))
    await link.close()


async def test_control_calls_are_allow_listed(start_replica) -> None:
    replica = await (await start_replica()).ready()
    stub = stage_grpc.StageServiceStub(open_channel(replica.endpoint))
    answer = await stub.Call(stage_pb.CallRequest(method="reset_prefix_cache"), timeout=5)
    assert json_format.MessageToDict(answer.result) is True
    for request, reason in (
        (stage_pb.CallRequest(method="__init__"), Reason.METHOD_NOT_ALLOWED),
        (stage_pb.CallRequest(method="stop"), Reason.METHOD_NOT_ALLOWED),
    ):
        try:
            await stub.Call(request, timeout=5)
            raise AssertionError("it was allowed")
        except grpc.aio.AioRpcError as error:
            assert MeshError.from_rpc_error(error).reason == reason


async def test_describe_says_what_runs(start_replica) -> None:
    replica = await (await start_replica(final_output_type="audio")).ready()
    stub = stage_grpc.StageServiceStub(open_channel(replica.endpoint))
    answer = await stub.DescribeStage(stage_pb.DescribeStageRequest(), timeout=5)
    assert answer.replica == replica.reference
    assert (answer.engine, answer.output_modality) == ("synthetic", frame_pb.MODALITY_AUDIO)
    assert list(answer.device_ids) == ["cpu:0"]
    assert "sleep" in answer.call_methods


async def test_health_is_ready_once_the_probe_passed(start_replica) -> None:
    replica = await (await start_replica()).ready()
    stub = health_pb2_grpc.HealthStub(open_channel(replica.endpoint))
    for service in ("", "stagemesh.v1.StageService", "stagemesh.v1.TensorService"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


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


async def test_self_probe_keeps_no_tensor(start_replica) -> None:
    replica = await start_replica(final_output_type="latent", engine_args={"tensor_shape": [64, 1024]})
    await replica.ready()
    assert not [*Path("/dev/shm").glob(f"stagemesh-{replica.process.pid}-*")]


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
    assert psutil.Process(consumer.process.pid).num_fds() == before
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

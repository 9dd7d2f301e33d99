"""A whole replica process with the synthetic engine: its start, its end, what it says of itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import psutil
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from replica_harness import reason_of

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import open_channel
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import stage_pb2_grpc as stage_grpc
from stagemesh_worker.replica import control


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


def test_starting_a_replica_loads_nothing_that_has_threads() -> None:
    """Threads that were there before the cores were set would keep the node's cores, and a fork after gRPC hangs."""
    names = "('grpc', 'numpy', 'torch')"
    asked = f"print(len(os.listdir('/proc/self/task')), *(name for name in {names} if name in sys.modules))"
    code = f"import os, sys; import stagemesh_worker.replica.__main__; {asked}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "1"


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
    assert reason_of(ending) == Reason.DRAINING
    await replica.until(control.Drained)
    assert (await link.end_of(1)).HasField("finished")
    await link.close()


async def test_drain_gives_up_after_its_grace(start_replica) -> None:
    replica = await (await start_replica(engine_args={"tokens_per_second": 1, "tokens": 1000})).ready()
    link = await replica.link()
    await link.submit(1)
    await link.until(lambda link: bool(link.token_ids(1)))
    await replica.tell(control.Drain(0.2))
    assert reason_of(await link.end_of(1)) == Reason.DRAINING
    await replica.until(control.Drained)
    await link.close()


async def test_engine_death_fails_its_tasks_and_is_reported(start_replica) -> None:
    replica = await (await start_replica(engine_args={"die_after": 60, "tokens": 1000})).ready()
    link = await replica.link()
    await link.submit(1)
    assert reason_of(await link.end_of(1)) == Reason.ENGINE_DEAD
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
    assert reason_of(await link.end_of(1)) == Reason.ENGINE_STUCK
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


async def test_R19_describe_says_what_runs(start_replica) -> None:
    replica = await (await start_replica(final_output_type="audio")).ready()
    stub = stage_grpc.StageServiceStub(open_channel(replica.endpoint))
    answer = await stub.DescribeStage(stage_pb.DescribeStageRequest(), timeout=5)
    assert answer.replica == replica.reference
    assert (answer.engine, answer.output_modality) == ("synthetic", frame_pb.MODALITY_AUDIO)
    assert list(answer.supported_tasks) == ["speech"]
    assert list(answer.device_ids) == ["cpu:0"]
    assert "sleep" in answer.call_methods


async def test_health_is_ready_once_the_probe_passed(start_replica) -> None:
    replica = await (await start_replica()).ready()
    stub = health_pb2_grpc.HealthStub(open_channel(replica.endpoint))
    for service in ("", "stagemesh.v1.StageService", "stagemesh.v1.TensorService"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_self_probe_keeps_no_tensor(start_replica) -> None:
    replica = await start_replica(final_output_type="latent", engine_args={"tensor_shape": [64, 1024]})
    await replica.ready()
    assert not [*Path("/dev/shm").glob(f"stagemesh-{replica.process.pid}-*")]

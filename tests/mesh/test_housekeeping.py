"""What the head does besides: releasing tensors, watching progress, control calls, and starting lightly."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh.v1 import tensor_pb2_grpc as tensor_rpc
from stagemesh_head.links import release
from stagemesh_head.links.release import TensorReleaser
from tests.mesh.harness import PAINTER, WRITER, cluster, eventually, make_pipeline
from tests.mesh.scripted_stage import WAIT_S


class Store(tensor_rpc.TensorServiceServicer):
    """A replica's tensor store, as far as releases go."""

    def __init__(self) -> None:
        self.released: asyncio.Queue[list[str]] = asyncio.Queue()
        self.refusals = 0
        """So many calls fail before one is answered."""

    async def ReleaseTensors(
        self, request: tensor_pb.ReleaseTensorsRequest, context: grpc.aio.ServicerContext
    ) -> tensor_pb.ReleaseTensorsResponse:
        assert not request.request_id
        if self.refusals:
            self.refusals -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "too busy")
        self.released.put_nowait(list(request.keys))
        return tensor_pb.ReleaseTensorsResponse(released=len(request.keys))


@pytest.fixture
async def store():
    server, servicer = grpc.aio.server(), Store()
    tensor_rpc.add_TensorServiceServicer_to_server(servicer, server)
    servicer.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(None)


async def test_tensors_between_stages_are_released_when_the_request_is_over(tmp_path: Path, store: Store) -> None:
    encoder = {"name": "encoder", "stage_type": "llm", "final_output": False, "final_output_type": "latent"}
    async with cluster(tmp_path, [encoder, {**PAINTER, "inputs": ["encoder"]}]) as mesh:
        stages = [await mesh.add(name) for name in ("encoder", "painter")]
        call = mesh.generate()
        task = await stages[0].next_task()
        reference = tensor_pb.TensorRef(endpoint=store.endpoint, key="k1", dtype="float32", shape=[4])
        task.tensor("latent", reference)
        task.finish()
        picture = await stages[1].next_task()
        assert picture.submit.inputs[0].tensors[0].value.ref == reference
        assert store.released.empty()
        picture.finish()
        await call.rest()
        async with asyncio.timeout(WAIT_S):
            assert await store.released.get() == ["k1"]


async def test_releases_to_one_replica_travel_together_and_a_dead_one_does_no_harm(store: Store) -> None:
    releaser = TensorReleaser()
    dead = tensor_pb.TensorRef(endpoint="127.0.0.1:1", key="x")
    releaser.release([dead, *(tensor_pb.TensorRef(endpoint=store.endpoint, key=f"k{n}") for n in range(5))], 0.0)
    releaser.release([tensor_pb.TensorRef(endpoint=store.endpoint, key="later")], 60.0)
    async with asyncio.timeout(WAIT_S):
        assert await store.released.get() == [f"k{n}" for n in range(5)]
    await releaser.stop()
    assert await store.released.get() == ["later"]


async def test_a_release_that_found_its_replica_busy_is_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "RETRY_S", 0.01)
    store.refusals = release.TRIES - 1
    releaser = TensorReleaser()
    releaser.release([tensor_pb.TensorRef(endpoint=store.endpoint, key=key) for key in ("k1", "k2")], 0.0)
    async with asyncio.timeout(WAIT_S):
        assert await store.released.get() == ["k1", "k2"]
    await releaser.stop()


async def test_tensors_of_a_start_that_was_given_up_are_released_too(tmp_path: Path, store: Store) -> None:
    encoder = {"name": "encoder", "stage_type": "llm", "final_output": False, "final_output_type": "latent"}
    async with cluster(tmp_path, [encoder, {**PAINTER, "inputs": ["encoder"]}]) as mesh:
        encoders = [await mesh.add("encoder", number) for number in (0, 1)]
        painter = await mesh.add("painter")
        call = mesh.generate()
        await eventually(lambda: any(one.has_arrivals for one in encoders))
        first = next(one for one in encoders if one.has_arrivals)
        task = await first.next_task()
        task.tensor("latent", tensor_pb.TensorRef(endpoint=store.endpoint, key="k1", dtype="float32", shape=[4]))
        task.fail(MeshError(Reason.ENGINE_DEAD, "the engine died"))
        again = await next(one for one in encoders if one is not first).next_task()
        again.tensor("latent", tensor_pb.TensorRef(endpoint=store.endpoint, key="k2", dtype="float32", shape=[4]))
        again.finish()
        (await painter.next_task()).finish()
        await call.rest()
        async with asyncio.timeout(WAIT_S):
            assert await store.released.get() == ["k1", "k2"]


async def test_R9_a_task_that_says_nothing_fails_its_request_in_the_end(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER], progress_timeout_s=0.3) as mesh:
        writer = await mesh.add("writer")
        silent, lively = mesh.generate("silent"), mesh.generate("lively")
        tasks = {(t := await writer.next_task()).submit.prompt.text: t for _ in range(2)}
        ended = asyncio.create_task(silent.error())
        while not ended.done():
            tasks["lively"].tokens([1], "x")
            await asyncio.wait([ended], timeout=0.05)
        error = ended.result()
        assert (error.reason, error.metadata["stage"]) == (Reason.ENGINE_STUCK, "writer")
        await tasks["silent"].aborted()
        tasks["lively"].finish()
        await lively.rest()


async def test_R14_a_control_call_gives_a_result_for_every_replica_and_errors_are_each_ones_own(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER, PAINTER]) as mesh:
        replicas = [await mesh.add("writer", 0), await mesh.add("writer", 1), await mesh.add("painter")]
        results = await mesh.gateway.calls.call("demo", ["painter", "writer"], "sleep", [1], {"tags": ["x"]}, 5.0)
        assert [(r.replica.stage, r.replica.replica_id) for r in results] == [
            ("painter", 0),
            ("writer", 0),
            ("writer", 1),
        ]
        assert results[1].result.string_value == f"sleep on {replicas[0].incarnation}"
        replicas[1].call_takes_s = 60.0
        results = await mesh.gateway.calls.call("demo", ["writer"], "sleep", [], {}, 0.2)
        assert results[0].HasField("result")
        assert results[1].error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


async def test_R14_a_control_call_that_is_not_allowed_reaches_nobody(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        await mesh.add("writer")
        with pytest.raises(Exception, match="'system': not allowed; methods are add_lora") as caught:
            await mesh.gateway.calls.call("demo", ["writer"], "system", ["rm"], {}, 1.0)
        assert caught.value.reason is Reason.METHOD_NOT_ALLOWED


async def test_R14_a_control_call_of_the_operators_own_is_allowed_on_the_stage_that_names_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER | {"control_methods": ["warm_up"]}, PAINTER]) as mesh:
        writer = await mesh.add("writer")
        await mesh.add("painter")
        (result,) = await mesh.gateway.calls.call("demo", ["writer"], "warm_up", [], {}, 5.0)
        assert result.result.string_value == f"warm_up on {writer.incarnation}"
        with pytest.raises(Exception, match="'warm_up': not allowed"):
            await mesh.gateway.calls.call("demo", ["painter"], "warm_up", [], {}, 5.0)


def test_a_head_serves_within_two_seconds_is_small_and_ends_cleanly(tmp_path: Path) -> None:
    make_pipeline(tmp_path, [WRITER])
    ready = tmp_path / "ready"
    start = time.monotonic()
    head = subprocess.Popen(
        [sys.executable, "-m", "stagemesh_head", str(tmp_path / "demo.yaml"), "--listen", "127.0.0.1:0",
         "--ready-file", str(ready)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while not ready.exists():
            assert head.poll() is None, head.stderr.read()
            assert time.monotonic() < start + 30
            time.sleep(0.01)
        process = psutil.Process(head.pid)
        # CPU time, since a loaded machine gives it less of the clock.
        assert sum(process.cpu_times()[:2]) < 2.0
        assert process.memory_info().rss < 200 << 20
        address = ready.read_text().strip()
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", "stagemesh.v1.InferenceService", "stagemesh.v1.RegistryService"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        os.kill(head.pid, signal.SIGTERM)
        assert head.wait(20) == 0
        assert not ready.exists()
    finally:
        if head.poll() is None:
            head.kill()
        head.communicate()


def test_a_head_imports_no_engine_library() -> None:
    program = "import sys, stagemesh_head.app, stagemesh_head.cli; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "vllm", "diffusers", "transformers", "numpy"}
    assert not heavy & {name.split(".")[0] for name in loaded}

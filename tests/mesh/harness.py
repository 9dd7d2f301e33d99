"""A gateway on a real port, with scripted replicas behind it and a client before it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from stagemesh.config import Pipeline, load_pipeline
from stagemesh.rpc.errors import MeshError
from stagemesh.rpc.options import CHANNEL_OPTIONS, SERVER_OPTIONS
from stagemesh.v1 import header_pb2 as header_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import inference_pb2_grpc as inference_rpc
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh_head.gateway import Gateway
from stagemesh_head.orchestration.recovery import RecoveryLimits
from stagemesh_head.registry.rows import ReplicaKey
from tests.mesh.scripted_stage import WAIT_S, ScriptedStage
from tests.mesh.static_membership import StaticMembership


def make_pipeline(folder: Path, stages: Sequence[dict[str, Any]], name: str = "demo", **options: Any) -> Pipeline:
    """A pipeline of synthetic stages, by way of a file."""
    path = folder / f"{name}.yaml"
    path.write_text(
        json.dumps({"name": name, "stages": [{"engine": "synthetic", **stage} for stage in stages], **options})
    )
    return load_pipeline(path)


WRITER = {"name": "writer", "stage_type": "llm", "final_output": True}
PAINTER = {"name": "painter", "stage_type": "diffusion", "inputs": ["writer"], "final_output": True}


class Cluster:
    """The gateway, its replicas by (stage, replica id), and a stub."""

    def __init__(
        self, pipelines: Sequence[Pipeline], recovery: RecoveryLimits | None = None, progress_timeout_s: float = 600.0
    ) -> None:
        self.membership = StaticMembership()
        self.pipeline = pipelines[0]
        self.gateway = Gateway(
            pipelines,
            self.membership,
            lambda: header_pb.ResponseHeader(mesh_id="test", head_epoch="epoch", revision=1),
            recovery=recovery,
            progress_timeout_s=progress_timeout_s,
        )
        self.stages: dict[tuple[str, int], ScriptedStage] = {}

    async def start(self) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self.gateway.add_to(self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.gateway.start()
        self.address = f"127.0.0.1:{port}"
        self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self.stub = inference_rpc.InferenceServiceStub(self._channel)

    async def stop(self) -> None:
        await self._channel.close()
        await self.gateway.stop()
        await self._server.stop(None)
        for stage in self.stages.values():
            await stage.crash()

    def key(self, stage: str, replica_id: int = 0) -> ReplicaKey:
        return ReplicaKey(self.pipeline.name, stage, replica_id)

    async def add(self, stage: str, replica_id: int = 0) -> ScriptedStage:
        """Start a replica and wait until the gateway has a link to it."""
        replica = self.stages[stage, replica_id] = ScriptedStage()
        await replica.start()
        self.membership.ready(self.pipeline.name, stage, replica_id, replica.endpoint, replica.incarnation)
        await self.linked(stage, replica_id)
        return replica

    async def linked(self, stage: str, replica_id: int = 0) -> None:
        """Wait until a replica takes tasks."""
        pool = self.gateway.pools.of(self.pipeline.name, stage)
        await eventually(lambda: any(m.replica_id == replica_id and m.is_eligible for m in pool.members()))

    def generate(self, prompt: str = "hello", **fields: Any) -> Call:
        """Start a request."""
        timeout, token = fields.pop("timeout", WAIT_S), fields.pop("token", "")
        metadata = (("authorization", f"Bearer {token}"),) if token else None
        request = inference_pb.GenerateRequest(prompt=prompt_pb.Prompt(text=prompt), **fields)
        return Call(self.stub.Generate(request, timeout=timeout, metadata=metadata))

    @property
    def inflight(self) -> int:
        """Tasks that are bound to replicas now."""
        return sum(pool.inflight for pool in self.gateway.pools.of_pipeline(self.pipeline.name))

    async def quiet(self) -> None:
        """Wait until no task is bound and no request runs."""
        await eventually(lambda: self.inflight == 0 and self.gateway.orchestrator.running == 0)


class Call:
    """A client's call."""

    def __init__(self, call: grpc.aio.UnaryStreamCall) -> None:
        self.call = call
        self.responses: list[inference_pb.GenerateResponse] = []

    async def next(self) -> inference_pb.GenerateResponse:
        """The next response. Raises MeshError when the call failed, and AssertionError when it ended."""
        try:
            response = await self.call.read()
        except grpc.RpcError as error:
            raise MeshError.from_rpc_error(error) from None
        assert response is not grpc.aio.EOF, "the stream ended"
        self.responses.append(response)
        return response

    async def rest(self) -> list[inference_pb.GenerateResponse]:
        """All responses to the end."""
        try:
            while (response := await self.call.read()) is not grpc.aio.EOF:
                self.responses.append(response)
        except grpc.RpcError as error:
            raise MeshError.from_rpc_error(error) from None
        return self.responses

    async def error(self) -> MeshError:
        """The error that ends the call."""
        try:
            await self.rest()
        except MeshError as error:
            return error
        raise AssertionError("the call ended well")

    def cancel(self) -> None:
        self.call.cancel()

    def text(self, stage: str = "writer") -> str:
        """Text of a stage so far."""
        return "".join(r.frame.text.text for r in self.responses if r.frame.stage == stage)

    def token_ids(self, stage: str = "writer") -> list[int]:
        """Tokens of a stage so far."""
        return [t for r in self.responses if r.frame.stage == stage for t in r.frame.text.token_ids]

    @property
    def finished(self) -> inference_pb.RequestFinished:
        """The last message."""
        return self.responses[-1].finished

    def kinds(self) -> list[str]:
        """What came, in order: frame contents, and `finished` at the end."""
        return [r.frame.WhichOneof("content") or "finished" for r in self.responses]


def llm(stage: str, **params: Any) -> inference_pb.StageSampling:
    """Sampling parameters of an llm stage."""
    return inference_pb.StageSampling(
        stage=stage, params=sampling_pb.SamplingParams(llm=sampling_pb.LlmSamplingParams(**params))
    )


def diffusion(stage: str, **params: Any) -> inference_pb.StageSampling:
    """Sampling parameters of a diffusion stage."""
    return inference_pb.StageSampling(
        stage=stage, params=sampling_pb.SamplingParams(diffusion=sampling_pb.DiffusionSamplingParams(**params))
    )


async def eventually(condition: Any, timeout: float = WAIT_S) -> None:
    """Give the loop turns until `condition()` holds."""
    async with asyncio.timeout(timeout):
        # There is no event for what a test looks at inside the gateway.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def cluster(
    folder: Path,
    stages: Sequence[dict[str, Any]],
    *,
    recovery: RecoveryLimits | None = None,
    progress_timeout_s: float = 600.0,
    **options: Any,
) -> AsyncIterator[Cluster]:
    """A running cluster of one pipeline, without replicas yet; `options` are the pipeline file's."""
    running = Cluster([make_pipeline(folder, stages, **options)], recovery, progress_timeout_s)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()

"""A head of a few lines whose `Generate` plays one script a call, for tests of the client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from stagemesh.rpc.errors import DETAILS_KEY, MeshError
from stagemesh.rpc.options import SERVER_OPTIONS
from stagemesh.v1 import admin_pb2_grpc as admin_grpc
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import inference_pb2_grpc as inference_grpc
from stagemesh.v1 import pipeline_pb2 as pipeline_pb

Script = Callable[[inference_pb.GenerateRequest, grpc.ServicerContext], Iterator[inference_pb.GenerateResponse]]


def fail(context: grpc.ServicerContext, error: MeshError) -> None:
    """End the call as the mesh does."""
    context.set_trailing_metadata(((DETAILS_KEY, error.to_status().SerializeToString()),))
    context.abort(error.code, error.message)


class ScriptedHead(inference_grpc.InferenceServiceServicer):
    """Plays `scripts` in order, the last one for ever; keeps what it was asked."""

    def __init__(self, *scripts: Script, port: int = 0, admin: Any = None, credentials: Any = None) -> None:
        self.scripts = list(scripts)
        self.requests: list[inference_pb.GenerateRequest] = []
        self.cancelled = threading.Event()
        self.asked_pipeline = 0
        self.pipeline_errors: list[MeshError] = []
        """What `GetPipeline` fails with, once each, before it answers."""
        self.ready_writers = 1
        self._server = grpc.server(ThreadPoolExecutor(8), options=SERVER_OPTIONS)
        inference_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        self.admin = admin
        if admin is not None:
            admin_grpc.add_AdminServiceServicer_to_server(admin, self._server)
        self.metadata: list[dict[str, Any]] = []
        address = f"127.0.0.1:{port}"
        if credentials is not None:
            self.port = self._server.add_secure_port(address, credentials)
        else:
            self.port = self._server.add_insecure_port(address)
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.stop(None).wait(10)

    def Generate(self, request, context):  # type: ignore[no-untyped-def]
        kept = inference_pb.GenerateRequest()
        kept.CopyFrom(request)
        self.requests.append(kept)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        context.add_callback(lambda: None if context.code() == grpc.StatusCode.OK else self.cancelled.set())
        yield from script(request, context)

    def GenerateInteractive(self, request_iterator, context):  # type: ignore[no-untyped-def]
        """Says each chunk back as soon as it comes."""
        context.add_callback(lambda: None if context.code() == grpc.StatusCode.OK else self.cancelled.set())
        for number, message in enumerate(request_iterator, 1):
            prompt = message.open.prompt if message.HasField("open") else message.append
            if message.HasField("open"):
                self.requests.append(message.open)
            echo = text(self.requests[0], number, f"[{prompt.text}]", number)
            yield inference_pb.GenerateInteractiveResponse.FromString(echo.SerializeToString())
        yield inference_pb.GenerateInteractiveResponse.FromString(
            the_end(self.requests[0], number + 1).SerializeToString()
        )

    def AbortRequest(self, request, context):  # type: ignore[no-untyped-def]
        outcomes = {"runs": inference_pb.ABORT_OUTCOME_ABORTED}
        return inference_pb.AbortRequestResponse(
            results=[
                inference_pb.AbortResult(
                    request_id=name, outcome=outcomes.get(name, inference_pb.ABORT_OUTCOME_UNKNOWN)
                )
                for name in request.request_ids
            ]
        )

    def ListPipelines(self, request, context):  # type: ignore[no-untyped-def]
        # One row a page, so that a client that ignores the token misses some.
        names = ["portraits", "shapes"]
        position = int(request.page_token or 0)
        writer = pipeline_pb.StageInfo(
            name="writer",
            stage_type="llm",
            output_modality=frame_pb.MODALITY_TEXT,
            target_replicas=1,
            ready_replicas=self.ready_writers,
        )
        following = str(position + 1) if position + 1 < len(names) else ""
        return inference_pb.ListPipelinesResponse(
            pipelines=[pipeline_pb.PipelineInfo(name=names[position], stages=[writer])], next_page_token=following
        )

    def GetPipeline(self, request, context):  # type: ignore[no-untyped-def]
        self.asked_pipeline += 1
        self.metadata.append(dict(context.invocation_metadata()))
        if self.pipeline_errors:
            fail(context, self.pipeline_errors.pop(0))
        stages = [
            pipeline_pb.StageInfo(stage_id=0, name="writer", stage_type="llm", target_replicas=1, ready_replicas=1),
            pipeline_pb.StageInfo(
                stage_id=1,
                name="painter",
                stage_type="diffusion",
                inputs=["writer"],
                final_output=True,
                output_modality=frame_pb.MODALITY_IMAGE,
                edge=pipeline_pb.EDGE_MODE_WHOLE,
            ),
        ]
        stages[1].default_sampling_params.update({"num_inference_steps": 20})
        return inference_pb.GetPipelineResponse(
            pipeline=pipeline_pb.PipelineInfo(name="shapes", revision="abc", stages=stages),
            problems=["painter: no node serves it"],
        )


def text(request: inference_pb.GenerateRequest, sequence: int, piece: str, *token_ids: int, index: int = 0):  # type: ignore[no-untyped-def]
    delta = frame_pb.TextDelta(text=piece, token_ids=token_ids, index=index)
    return framed(request, sequence, frame_pb.Frame(stage="writer", replica_id=1, text=delta))


def framed(
    request: inference_pb.GenerateRequest, sequence: int, frame: frame_pb.Frame
) -> inference_pb.GenerateResponse:
    return inference_pb.GenerateResponse(request_id=request.request_id, sequence=sequence, frame=frame)


def the_end(request: inference_pb.GenerateRequest, sequence: int) -> inference_pb.GenerateResponse:
    finished = inference_pb.RequestFinished(finish_reason=frame_pb.FINISH_REASON_COMPLETE)
    finished.total.FromMilliseconds(1500)
    finished.usage.completion_tokens = 2
    return inference_pb.GenerateResponse(request_id=request.request_id, sequence=sequence, finished=finished)


def whole_answer(
    request: inference_pb.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[inference_pb.GenerateResponse]:
    """Two tokens, and the end."""
    yield text(request, 1, "a red ", 11, 12)
    yield text(request, 2, "circle", 13)
    yield the_end(request, 3)


def failing(error: MeshError) -> Script:
    """A script that fails at once."""

    def script(
        request: inference_pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb.GenerateResponse]:
        fail(context, error)
        yield  # pragma: no cover  (abort raises)

    return script


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

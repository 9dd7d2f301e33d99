"""StageService: opens links, answers control calls, describes the stage. It decides nothing about a task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf import json_format

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import stage_pb2_grpc as stage_grpc
from stagemesh.wire import MODALITIES, supported_tasks
from stagemesh_worker.replica.calls import ControlCalls
from stagemesh_worker.replica.identity import Identity
from stagemesh_worker.replica.links import Links

OPEN_TIMEOUT_S = 10.0


class StageServicer(stage_grpc.StageServiceServicer):
    """What a replica serves to heads."""

    def __init__(self, identity: Identity, links: Links, calls: ControlCalls) -> None:
        self._identity = identity
        self._links = links
        self._calls = calls

    async def Execute(  # type: ignore[override]  # it writes by itself, which merges better than yielding
        self, request_iterator: AsyncIterator[stage_pb.ExecuteRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """One head's stream."""
        try:
            first = await self._opening(request_iterator)
        except MeshError as error:
            await error.abort(context)
        link = self._links.open(first.open.head_epoch)
        ready = stage_pb.LinkReady(replica=self._identity.reference, max_concurrency=self._links.max_concurrency)
        reader = asyncio.create_task(link.read(_after(first, request_iterator)), name="link reader")
        # The reader's end is the stream's end: the writer below then finds the outbox closed.
        reader.add_done_callback(lambda _: link.close())
        try:
            await context.write(stage_pb.ExecuteResponse(ready=ready))
            while (message := await link.outbox.take()) is not None:
                await context.write(message)
        finally:
            link.close()
            self._links.closed(link)
            reader.cancel()
        broken = reader.exception() if reader.done() and not reader.cancelled() else None
        if broken is not None:
            await MeshError.from_exception(broken).abort(context)

    async def _opening(self, requests: AsyncIterator[stage_pb.ExecuteRequest]) -> stage_pb.ExecuteRequest:
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            raise MeshError(Reason.INVALID_REQUEST, f"no `open` within {OPEN_TIMEOUT_S:g} s") from None
        if first is None or not first.HasField("open"):
            raise MeshError(Reason.INVALID_REQUEST, "open: is missing: the first message of Execute must have it")
        self._identity.check(first.open.replica)
        return first

    async def Call(
        self, request: stage_pb.CallRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> stage_pb.CallResponse:
        """One control call."""
        try:
            arguments: list[Any] = json_format.MessageToDict(request.args)  # type: ignore[assignment]
            keywords = json_format.MessageToDict(request.kwargs)
            result = await self._calls.call(request.method, arguments, keywords)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await MeshError.from_exception(error).abort(context)
        return stage_pb.CallResponse(result=result)

    async def DescribeStage(
        self, request: stage_pb.DescribeStageRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> stage_pb.DescribeStageResponse:
        """What runs here."""
        engine, identity = self._links.engine, self._identity
        return stage_pb.DescribeStageResponse(
            replica=identity.reference,
            pipeline_revision=identity.pipeline_revision,
            engine=engine.name,
            engine_version=engine.version,
            supported_tasks=supported_tasks(engine.stage.final_output_type),
            call_methods=sorted(self._calls.methods),
            device_ids=list(engine.devices.ids),
            output_modality=MODALITIES[engine.stage.final_output_type],
        )


async def _after(
    first: stage_pb.ExecuteRequest, rest: AsyncIterator[stage_pb.ExecuteRequest]
) -> AsyncIterator[stage_pb.ExecuteRequest]:
    yield first
    async for request in rest:
        yield request

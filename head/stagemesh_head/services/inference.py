"""InferenceService: what clients call. Parses, calls, maps errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from hashlib import blake2b
from typing import Any

import grpc

from stagemesh.rpc.errors import MeshError, invalid
from stagemesh.telemetry.context import TraceContext
from stagemesh.v1 import header_pb2 as header_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import inference_pb2_grpc as inference_rpc
from stagemesh_head.links.outputs import OutputRelay
from stagemesh_head.orchestration.catalogue import Catalogue
from stagemesh_head.orchestration.events import StopCause
from stagemesh_head.orchestration.orchestrator import Orchestrator
from stagemesh_head.orchestration.run import RequestRun
from stagemesh_head.services.paging import page_of

Context = grpc.aio.ServicerContext[Any, Any]

FIRST_MESSAGE_S = 10.0
"""For a client that opens an interactive call to say what it wants."""
DEADLINE_MARGIN_S, DEADLINE_MARGIN_SHARE = 0.05, 0.1
"""The head's own deadline comes this long before the call's, so that its answer still reaches the client."""


class InferenceServicer(inference_rpc.InferenceServiceServicer):
    """One for all pipelines of a head."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        outputs: OutputRelay,
        catalogue: Catalogue,
        header: Callable[[], header_pb.ResponseHeader],
    ) -> None:
        self._orchestrator = orchestrator
        self._outputs = outputs
        self._catalogue = catalogue
        self._header = header

    async def Generate(self, request: inference_pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Stream a request's outputs. Leaving the call, in whatever way, stops the request."""
        try:
            run = self._orchestrator.open(
                request, time_left_s=time_left(context), trace=trace_of(context), client=client_of(context)
            )
        except MeshError as error:
            await error.abort(context)
        try:
            while responses := await run.stream.next():
                for response in responses:
                    await context.write(response)
        except MeshError as error:
            await error.abort(context)
        finally:
            self._orchestrator.close(run)

    async def GenerateInteractive(  # type: ignore[override]
        self, request_iterator: AsyncIterator[inference_pb.GenerateInteractiveRequest], context: Context
    ) -> None:
        """Generate with input that goes on; the end of the client's messages is the end of the input."""
        try:
            run = await self._open_interactive(request_iterator, context)
        except MeshError as error:
            await error.abort(context)
        reader = asyncio.create_task(self._append_all(run, request_iterator), name="interactive input")
        try:
            while responses := await run.stream.next():
                for response in responses:
                    # The same fields by the same numbers.
                    await context.write(
                        inference_pb.GenerateInteractiveResponse.FromString(response.SerializeToString())
                    )
        except MeshError as error:
            await error.abort(context)
        finally:
            reader.cancel()
            self._orchestrator.close(run)

    async def _open_interactive(
        self, messages: AsyncIterator[inference_pb.GenerateInteractiveRequest], context: Context
    ) -> RequestRun:
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                first = await anext(aiter(messages), None)
        except TimeoutError:
            raise invalid("input", "", f"no first message within {FIRST_MESSAGE_S:g} s") from None
        if first is None or first.WhichOneof("input") != "open":
            raise invalid("input", "", "the first message must have `open`")
        if first.HasField("params"):
            raise invalid("params", "", "the first message has its parameters in `open.sampling`")
        return self._orchestrator.open(
            first.open,
            time_left_s=time_left(context),
            trace=trace_of(context),
            is_interactive=True,
            client=client_of(context),
        )

    async def _append_all(
        self, run: RequestRun, messages: AsyncIterator[inference_pb.GenerateInteractiveRequest]
    ) -> None:
        try:
            async for message in messages:
                if message.WhichOneof("input") != "append":
                    raise invalid("input", message.WhichOneof("input") or "", "messages after the first have `append`")
                self._orchestrator.append(run, message.append, message.params if message.HasField("params") else None)
            run.append(None, None, is_last=True)
        except MeshError as error:
            run.stop(StopCause.FAILED, error)

    async def AbortRequest(
        self, request: inference_pb.AbortRequestRequest, context: Context
    ) -> inference_pb.AbortRequestResponse:
        """Stop requests and say what became of each."""
        timeout = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else None
        try:
            results = await self._orchestrator.abort(request.request_ids, timeout)
        except MeshError as error:
            await error.abort(context)
        return inference_pb.AbortRequestResponse(results=results)

    async def FetchOutput(  # type: ignore[override]
        self, request: inference_pb.FetchOutputRequest, context: Context
    ) -> None:
        """Stream an output that its replica keeps."""
        try:
            await self._outputs.send(request, context.write)
        except MeshError as error:
            await error.abort(context)

    async def ListPipelines(
        self, request: inference_pb.ListPipelinesRequest, context: Context
    ) -> inference_pb.ListPipelinesResponse:
        """A page of pipelines by name."""
        try:
            names, following = page_of(
                self._catalogue.names(), lambda name: [name], request.page_size, request.page_token
            )
        except MeshError as error:
            await error.abort(context)
        return inference_pb.ListPipelinesResponse(
            header=self._header(),
            pipelines=[self._catalogue.describe(name) for name in names],
            next_page_token=following,
        )

    async def GetPipeline(
        self, request: inference_pb.GetPipelineRequest, context: Context
    ) -> inference_pb.GetPipelineResponse:
        """One pipeline, and what keeps it from serving."""
        try:
            return inference_pb.GetPipelineResponse(
                header=self._header(),
                pipeline=self._catalogue.describe(request.name),
                problems=self._catalogue.problems(request.name),
            )
        except MeshError as error:
            await error.abort(context)


def time_left(context: Context) -> float | None:
    """Seconds that a request may take, a little less than its call has; None when the call has no deadline."""
    remaining: float | None = context.time_remaining()
    if remaining is None:
        return None
    return max(remaining - min(DEADLINE_MARGIN_S, remaining * DEADLINE_MARGIN_SHARE), 0.0)


def trace_of(context: Context) -> TraceContext:
    """The caller's span, if it has one."""
    metadata: Any = context.invocation_metadata() or ()
    return TraceContext.read(metadata)


def client_of(context: Context) -> str:
    """Whom the call is from, by the token it presents, which itself is not kept; empty without one."""
    metadata: Any = context.invocation_metadata() or ()
    token = next((str(value) for key, value in metadata if key == "authorization"), "")
    return blake2b(token.encode(), digest_size=8).hexdigest() if token else ""

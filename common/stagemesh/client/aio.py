"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, Self, TypeVar, Unpack

import grpc

from stagemesh.addresses import default_head
from stagemesh.client.connection import (
    CALL_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    PAGE_SIZE,
    Connection,
    abort_message,
    add_sampling,
)
from stagemesh.client.errors import StageMeshError, closed_here, from_call
from stagemesh.client.fetch import Fetch
from stagemesh.client.frames import Frame, Reference
from stagemesh.client.journey import Journey, RetryPolicy
from stagemesh.client.pipelines import AbortResult, PipelineInfo, abort_result, pipeline_info
from stagemesh.client.prompts import PromptLike, first_chunk, to_prompt
from stagemesh.client.requests import RequestOptions, build_request
from stagemesh.client.sampling import SamplingByStage, needs_stage_types
from stagemesh.client.tracing import traced
from stagemesh.rpc.options import open_channel
from stagemesh.rpc.security import Security
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import inference_pb2_grpc as inference_grpc

Answer = TypeVar("Answer")


class AsyncClient:
    """Speaks to a head or gateway from one event loop.

        async with AsyncClient() as client:
            async for frame in client.generate("a red circle on a blue background"):
                ...

    Its arguments are those of `Client`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        max_retries: int = 3,
        resume_window: float = 30.0,
        security: Security | None = None,
    ) -> None:
        self._connection = Connection(
            address or default_head(),
            timeout,
            RetryPolicy(max_retries, resume_window),
            security or Security.from_environment(),
        )
        self._channel: grpc.aio.Channel | None = None

    @property
    def address(self) -> str:
        """Where the head is."""
        return self._connection.address

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls end, with RequestAborted where somebody still reads."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _stub(self) -> Any:
        # Made at the first call: a channel belongs to the loop that runs when it is made.
        if self._channel is None:
            self._channel = open_channel(self.address, security=self._connection.security)
        return inference_grpc.InferenceServiceStub(self._channel)

    def generate(
        self,
        prompt: PromptLike,
        *,
        sampling: SamplingByStage | None = None,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[Frame]:
        """Send a request; yields its frames as they come, the last one a `Finished`. See `Client.generate`.

        Leaving the iteration early cancels the request in every stage: at once with `contextlib.aclosing`, else as soon
        as the event loop finds the abandoned iterator.
        """
        return self._frames(build_request(prompt, **options), sampling, timeout, options)

    async def _frames(
        self,
        request: inference_pb.GenerateRequest,
        sampling: SamplingByStage | None,
        timeout: float | None,
        options: RequestOptions,
    ) -> AsyncIterator[Frame]:
        journey = self._connection.journey(request, timeout, options)
        add_sampling(request, sampling, await self._asked_pipeline(request.pipeline, journey, sampling))
        with traced(journey) as metadata:
            while True:
                message, remaining = journey.next_call()
                call = self._stub().Generate(message, timeout=remaining, metadata=metadata)
                channel = self._channel
                try:
                    async for response in call:
                        frame = journey.accept(response)
                        if frame is not None:
                            yield await self._here(frame, journey)
                    if journey.is_finished:
                        return
                    error = journey.ended_early()
                except grpc.RpcError as rpc_error:
                    error = from_call(rpc_error, self.address)
                except asyncio.CancelledError:
                    self._blame_close(channel)
                    raise
                finally:
                    call.cancel()
                await asyncio.sleep(journey.delay_after(error))

    async def _asked_pipeline(
        self, name: str, journey: Journey, sampling: SamplingByStage | None
    ) -> PipelineInfo | None:
        """As `Client._asked_pipeline`."""
        while needs_stage_types(sampling):
            try:
                return await self.get_pipeline(name)
            except StageMeshError as error:
                await asyncio.sleep(journey.delay_after(error))
        return None

    async def generate_interactive(
        self,
        chunks: AsyncIterable[PromptLike],
        *,
        sampling: SamplingByStage | None = None,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[Frame]:
        """As `generate`, with a prompt that goes on while the output comes. See `Client.generate_interactive`.

        An exception of `chunks` ends the request and is raised here.
        """
        rest = aiter(chunks)
        request = build_request(first_chunk(await anext(rest, None)), **options)
        journey = self._connection.journey(request, timeout, options)
        add_sampling(request, sampling, await self._asked_pipeline(request.pipeline, journey, sampling))
        failures: list[Exception] = []

        async def messages() -> AsyncIterator[inference_pb.GenerateInteractiveRequest]:
            yield inference_pb.GenerateInteractiveRequest(open=request)
            try:
                async for chunk in rest:
                    yield inference_pb.GenerateInteractiveRequest(append=to_prompt(chunk))
            except Exception as error:
                failures.append(error)
                raise  # gRPC cancels the call

        with traced(journey) as metadata:
            call = self._stub().GenerateInteractive(messages(), timeout=journey.next_call()[1], metadata=metadata)
            channel = self._channel
            try:
                async for response in call:
                    frame = journey.accept(response)
                    if frame is not None:
                        yield await self._here(frame, journey)
            except grpc.RpcError as error:
                raise from_call(error, self.address) from None
            except asyncio.CancelledError:
                if failures:  # nobody cancelled us: gRPC cancelled the call
                    raise failures[0] from None
                self._blame_close(channel)
                raise
            finally:
                call.cancel()
            if not journey.is_finished:
                raise journey.ended_early()

    async def fetch(self, reference: Reference, *, timeout: float | None = None) -> Frame:
        """Bring an output that stayed with its replica. See `Client.fetch`."""
        fetch = Fetch(reference, self._connection.timeout_s if timeout is None else timeout)
        while True:
            message, remaining = fetch.next_call()
            call = self._stub().FetchOutput(message, timeout=remaining)
            channel = self._channel
            try:
                async for chunk in call:
                    fetch.accept(chunk)
                return fetch.result()
            except grpc.RpcError as error:
                delay = fetch.delay_after(from_call(error, self.address))
            except asyncio.CancelledError:
                self._blame_close(channel)
                raise
            finally:
                call.cancel()
            await asyncio.sleep(delay)

    async def _here(self, frame: Frame, journey: Journey) -> Frame:
        """As `Client._here`."""
        if isinstance(frame, Reference) and not journey.keeps_references:
            return await self.fetch(frame, timeout=journey.time_left_s)
        return frame

    async def abort(self, *request_ids: str, timeout: float = 2.0) -> list[AbortResult]:
        """Stop requests in every stage; waits up to `timeout` seconds for the stages' word."""
        message = abort_message(request_ids, timeout)
        response = await self._call(self._stub().AbortRequest, message, timeout + CALL_TIMEOUT_S)
        return [abort_result(result) for result in response.results]

    async def list_pipelines(self) -> list[PipelineInfo]:
        """What the head serves, by name."""
        pipelines: list[PipelineInfo] = []
        message = inference_pb.ListPipelinesRequest(page_size=PAGE_SIZE)
        while True:
            response = await self._call(self._stub().ListPipelines, message)
            pipelines += [pipeline_info(pipeline) for pipeline in response.pipelines]
            if not response.next_page_token:
                return pipelines
            message.page_token = response.next_page_token

    async def get_pipeline(self, name: str = "") -> PipelineInfo:
        """One pipeline, with what keeps it from serving; the only one there is when `name` is empty."""
        response = await self._call(self._stub().GetPipeline, inference_pb.GetPipelineRequest(name=name))
        return pipeline_info(response.pipeline, tuple(response.problems))

    async def _call(
        self, method: Callable[..., Awaitable[Answer]], message: Any, timeout: float = CALL_TIMEOUT_S
    ) -> Answer:
        channel = self._channel
        try:
            return await method(message, timeout=timeout)
        except grpc.RpcError as error:
            raise from_call(error, self.address) from None
        except asyncio.CancelledError:
            self._blame_close(channel)
            raise

    def _blame_close(self, channel: grpc.aio.Channel | None) -> None:
        """Raise RequestAborted where a call was cancelled by `close` alone: gRPC makes no difference, callers do."""
        task = asyncio.current_task()
        if channel is not self._channel and (task is None or not task.cancelling()):
            raise closed_here() from None

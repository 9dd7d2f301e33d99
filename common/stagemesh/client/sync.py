"""The synchronous client, on gRPC's synchronous API: no event loop, no thread of ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
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
from stagemesh.rpc.options import channel_credentials, channel_options
from stagemesh.rpc.security import Security
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import inference_pb2_grpc as inference_grpc

Answer = TypeVar("Answer")


def open_sync_channel(address: str, security: Security) -> grpc.Channel:
    """A channel of the synchronous API. Raises SecurityError when a token would cross an open network in clear."""
    options = channel_options(security)
    credentials = channel_credentials(address, security)
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


class Client:
    """Speaks to a head or gateway. Safe to share between threads.

        with Client() as client:
            for frame in client.generate("a red circle on a blue background"):
                ...

    Args:
        address: host:port; else the environment's STAGEMESH_HEAD, else 127.0.0.1:8470.
        timeout: seconds for a whole request, unless the call says otherwise.
        max_retries: further tries of a call that nothing came of, where the mesh says that waiting helps.
        resume_window: seconds to try to take up a broken stream.
        security: TLS files and token; those of the environment unless given.
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
        self._channel = open_sync_channel(self.address, self._connection.security)
        self._stub = inference_grpc.InferenceServiceStub(self._channel)
        self._is_closed = False

    @property
    def address(self) -> str:
        """Where the head is."""
        return self._connection.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls end, with RequestAborted where somebody still reads."""
        self._is_closed = True
        self._channel.close()

    def generate(
        self,
        prompt: PromptLike,
        *,
        sampling: SamplingByStage | None = None,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Frame]:
        """Send a request; yields its frames as they come, the last one a `Finished`.

        Leaving the iterator early cancels the request in every stage.

        Args:
            prompt: a text, chat messages ({"role", "content"}), token ids, or embeddings [tokens, hidden].
            sampling: parameters by stage: `{"painter": Diffusion(seed=7)}`, mappings of the same names, or a list.
            timeout: seconds for the whole request, retries included.
            options: see `RequestOptions`.

        Raises:
            StageMeshError: see `stagemesh.client.errors`; wrong arguments at once, the rest while iterating.
        """
        request = build_request(prompt, **options)
        journey = self._connection.journey(request, timeout, options)
        add_sampling(request, sampling, self._asked_pipeline(request.pipeline, journey, sampling))
        return self._frames(journey)

    def _asked_pipeline(self, name: str, journey: Journey, sampling: SamplingByStage | None) -> PipelineInfo | None:
        """The pipeline, where parameters cannot be read without it; asked for as often as a request is sent."""
        while needs_stage_types(sampling):
            try:
                return self.get_pipeline(name)
            except StageMeshError as error:
                time.sleep(journey.delay_after(error))
        return None

    def _frames(self, journey: Journey) -> Iterator[Frame]:
        with traced(journey) as metadata:
            while True:
                message, timeout = journey.next_call()
                call = self._begin(self._stub.Generate, message, timeout=timeout, metadata=metadata)
                try:
                    for response in call:
                        frame = journey.accept(response)
                        if frame is not None:
                            yield self._here(frame, journey)
                    if journey.is_finished:
                        return
                    error = journey.ended_early()
                except grpc.RpcError as rpc_error:
                    error = self._from_call(rpc_error)
                finally:
                    call.cancel()
                time.sleep(journey.delay_after(error))

    def generate_interactive(
        self,
        chunks: Iterable[PromptLike],
        *,
        sampling: SamplingByStage | None = None,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Frame]:
        """As `generate`, with a prompt that goes on while the output comes: each of `chunks` adds to it.

        `chunks` is read in a thread of gRPC's, its first item at once; its end is the end of the prompt. A stream that
        breaks is not taken up, since what `chunks` gave cannot be had again.
        """
        rest = iter(chunks)
        request = build_request(first_chunk(next(rest, None)), **options)
        journey = self._connection.journey(request, timeout, options)
        add_sampling(request, sampling, self._asked_pipeline(request.pipeline, journey, sampling))
        return self._interactive_frames(request, rest, journey)

    def _interactive_frames(
        self, request: inference_pb.GenerateRequest, rest: Iterator[PromptLike], journey: Journey
    ) -> Iterator[Frame]:
        def messages() -> Iterator[inference_pb.GenerateInteractiveRequest]:
            yield inference_pb.GenerateInteractiveRequest(open=request)
            for chunk in rest:
                yield inference_pb.GenerateInteractiveRequest(append=to_prompt(chunk))

        with traced(journey) as metadata:
            timeout = journey.next_call()[1]
            call = self._begin(self._stub.GenerateInteractive, messages(), timeout=timeout, metadata=metadata)
            try:
                for response in call:
                    frame = journey.accept(response)
                    if frame is not None:
                        yield self._here(frame, journey)
            except grpc.RpcError as error:
                raise self._from_call(error) from None
            finally:
                call.cancel()
            if not journey.is_finished:
                raise journey.ended_early()

    def fetch(self, reference: Reference, *, timeout: float | None = None) -> Frame:
        """Bring an output that stayed with its replica: the `TensorFrame`, `Media` or `AudioChunk` it stands for.

        Raises:
            NotFound: its time is over, or its replica is gone.
            StageMeshError: see `stagemesh.client.errors`.
        """
        fetch = Fetch(reference, self._connection.timeout_s if timeout is None else timeout)
        while True:
            message, remaining = fetch.next_call()
            call = self._begin(self._stub.FetchOutput, message, timeout=remaining)
            try:
                for chunk in call:
                    fetch.accept(chunk)
                return fetch.result()
            except grpc.RpcError as error:
                delay = fetch.delay_after(self._from_call(error))
            finally:
                call.cancel()
            time.sleep(delay)

    def _here(self, frame: Frame, journey: Journey) -> Frame:
        """The frame with its bytes, unless the request said to leave them."""
        if isinstance(frame, Reference) and not journey.keeps_references:
            return self.fetch(frame, timeout=journey.time_left_s)
        return frame

    def abort(self, *request_ids: str, timeout: float = 2.0) -> list[AbortResult]:
        """Stop requests in every stage; waits up to `timeout` seconds for the stages' word."""
        message = abort_message(request_ids, timeout)
        response = self._call(self._stub.AbortRequest, message, timeout + CALL_TIMEOUT_S)
        return [abort_result(result) for result in response.results]

    def list_pipelines(self) -> list[PipelineInfo]:
        """What the head serves, by name."""
        pipelines: list[PipelineInfo] = []
        message = inference_pb.ListPipelinesRequest(page_size=PAGE_SIZE)
        while True:
            response = self._call(self._stub.ListPipelines, message)
            pipelines += [pipeline_info(pipeline) for pipeline in response.pipelines]
            if not response.next_page_token:
                return pipelines
            message.page_token = response.next_page_token

    def get_pipeline(self, name: str = "") -> PipelineInfo:
        """One pipeline, with what keeps it from serving; the only one there is when `name` is empty."""
        response = self._call(self._stub.GetPipeline, inference_pb.GetPipelineRequest(name=name))
        return pipeline_info(response.pipeline, tuple(response.problems))

    def _call(self, method: Callable[..., Answer], message: Any, timeout: float = CALL_TIMEOUT_S) -> Answer:
        try:
            return self._begin(method, message, timeout=timeout)
        except grpc.RpcError as error:
            raise self._from_call(error) from None

    def _begin(self, method: Callable[..., Answer], message: Any, **options: Any) -> Answer:
        try:
            return method(message, **options)
        except ValueError:
            if self._is_closed:  # gRPC's word for it
                raise closed_here() from None
            raise

    def _from_call(self, error: grpc.RpcError) -> StageMeshError:
        return closed_here() if self._is_closed else from_call(error, self.address)

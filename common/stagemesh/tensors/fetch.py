"""How a consumer gets a tensor: inline, mapped from the same host's shared memory, or fetched from its owner."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

import grpc
from google.protobuf.message import DecodeError

from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.rpc.options import open_bulk_channel
from stagemesh.tensors import segments
from stagemesh.tensors.chunks import decode_chunk
from stagemesh.tensors.codec import Array, decode, from_buffer
from stagemesh.tensors.received import MAX_TENSOR_BYTES, Received, check_size
from stagemesh.tensors.service import FETCH_METHOD
from stagemesh.v1 import tensor_pb2 as tensor_pb

ATTEMPTS = 4
"""Streams opened for one tensor; each goes on where the one before broke."""
PROGRESS_S = 30.0
"""A stream that brings nothing for so long counts as broken, in seconds."""
MAX_CHANNELS = 64
"""Connections to owners kept open."""
_FIRST_BACKOFF_S = 0.1


class TensorResolver:
    """Gets tensors by value or reference, keeping connections to their owners.

    Args:
        host_id: identity of this host; equal to a reference's, its segment is mapped.
        channel_factory: makes the channel to an owner.
    """

    def __init__(
        self,
        *,
        host_id: str = "",
        channel_factory: Callable[[str], grpc.aio.Channel] = open_bulk_channel,
        max_tensor_bytes: int = MAX_TENSOR_BYTES,
        progress_s: float = PROGRESS_S,
    ) -> None:
        self._host_id = host_id
        self._open_channel = channel_factory
        self._max_bytes = max_tensor_bytes
        self._progress_s = progress_s
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._in_use: dict[str, int] = {}

    async def resolve(self, value: tensor_pb.TensorValue) -> Array:
        """The array, read-only. bfloat16 comes as float32.

        Raises:
            MeshError: TENSOR_GONE, TENSOR_CORRUPT, STALE_INCARNATION, UNREACHABLE, or INVALID_REQUEST for what is no
                tensor.
        """
        kind = value.WhichOneof("value")
        if kind == "inline":
            return decode(value.inline)
        if kind == "ref":
            return await self.resolve_ref(value.ref)
        raise invalid("tensor", None, "has neither bytes nor a reference")

    async def resolve_ref(self, ref: tensor_pb.TensorRef) -> Array:
        """As `resolve`, for a reference."""
        check_size(ref, self._max_bytes)
        mapped = self._map(ref)
        return mapped if mapped is not None else await self._fetch(ref)

    async def close(self) -> None:
        """Close the connections."""
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()

    def _map(self, ref: tensor_pb.TensorRef) -> Array | None:
        if not ref.shared_memory or not ref.size_bytes or not self._host_id or ref.host_id != self._host_id:
            return None
        try:
            mapping = segments.map_read_only(ref.shared_memory, ref.size_bytes)
        except (OSError, ValueError):
            # Released, another user's, or not our /dev/shm after all: its owner knows.
            return None
        return from_buffer(mapping, ref.dtype, ref.shape)

    async def _fetch(self, ref: tensor_pb.TensorRef) -> Array:
        received = Received(ref, ref.endpoint)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with self._channel(ref.endpoint) as channel:
                    await self._stream(channel, ref, received)
                break
            except MeshError as error:
                if not error.retryable or attempt == ATTEMPTS:
                    raise
            await asyncio.sleep(random.uniform(0, _FIRST_BACKOFF_S * 2**attempt))
        return from_buffer(received.verified(), ref.dtype, ref.shape)

    async def _stream(self, channel: grpc.aio.Channel, ref: tensor_pb.TensorRef, received: Received) -> None:
        request = tensor_pb.FetchTensorRequest(
            key=ref.key, owner_incarnation=ref.owner_incarnation, offset_bytes=received.size
        )
        fetch: grpc.aio.UnaryStreamMultiCallable[tensor_pb.FetchTensorRequest, bytes] = channel.unary_stream(
            FETCH_METHOD, request_serializer=tensor_pb.FetchTensorRequest.SerializeToString
        )
        call = fetch(request)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._progress_s) as deadline:
                async for message in call:
                    received.add(*decode_chunk(message))
                    deadline.reschedule(loop.time() + self._progress_s)
        except DecodeError as error:
            raise MeshError(Reason.TENSOR_CORRUPT, f"{ref.endpoint} sent what is no chunk: {error}") from error
        except TimeoutError:
            raise MeshError(Reason.UNREACHABLE, f"{ref.endpoint} sent nothing for {self._progress_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise MeshError.from_rpc_error(error) from error
        finally:
            call.cancel()
        received.check_end()

    @contextlib.asynccontextmanager
    async def _channel(self, endpoint: str) -> AsyncIterator[grpc.aio.Channel]:
        """The connection to an owner, opened when there is none; idle ones beyond the bound are closed."""
        channel = self._channels.pop(endpoint, None) or self._open_channel(endpoint)
        self._channels[endpoint] = channel
        self._in_use[endpoint] = self._in_use.get(endpoint, 0) + 1
        try:
            yield channel
        finally:
            self._in_use[endpoint] -= 1
            if not self._in_use[endpoint]:
                del self._in_use[endpoint]
            for other in [name for name in self._channels if name not in self._in_use]:
                if len(self._channels) <= MAX_CHANNELS:
                    break
                await self._channels.pop(other).close()

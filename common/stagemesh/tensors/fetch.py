"""How a consumer gets a tensor: inline, mapped from the same host's shared memory, or fetched from its owner."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.rpc.options import open_channel
from stagemesh.tensors import segments
from stagemesh.tensors.checksum import crc32
from stagemesh.tensors.chunks import decode_chunk
from stagemesh.tensors.codec import Array, decode, from_buffer, size_bytes
from stagemesh.tensors.service import FETCH_METHOD
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh.v1 import tensor_pb2_grpc as tensor_grpc

MAX_TENSOR_BYTES = 4 << 30
"""Largest tensor that is fetched (4 GiB): a wrong reference must not take all memory."""
ATTEMPTS = 4
"""Streams opened for one tensor; each goes on where the one before broke."""
PROGRESS_S = 30.0
"""A stream that brings nothing for so long counts as broken, in seconds."""
MAX_CHANNELS = 64
"""Connections to owners kept open."""
BULK_OPTIONS = (("grpc.http2.max_frame_size", 1 << 20),)
"""Frames of up to 1 MiB instead of 16 KiB: a seventh less CPU a byte on the receiving side."""
_FIRST_BACKOFF_S = 0.1


def open_bulk_channel(target: str) -> grpc.aio.Channel:
    """A channel with a connection of its own, for bulk: it delays nobody's control messages."""
    return open_channel(target, own_connection=True, extra=BULK_OPTIONS)


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
        size = size_bytes(ref.dtype, ref.shape)
        if size != ref.size_bytes:
            raise invalid("tensor.size_bytes", ref.size_bytes, f"{ref.dtype} {list(ref.shape)} takes {size} bytes")
        if size > self._max_bytes:
            raise invalid("tensor.size_bytes", size, f"at most {self._max_bytes} are fetched")
        mapped = self._map(ref)
        return mapped if mapped is not None else await self._fetch(ref)

    async def release(self, endpoint: str, *, keys: list[str] | None = None, request_id: str = "") -> int:
        """Tell an owner to drop tensors; returns how many it dropped."""
        request = tensor_pb.ReleaseTensorsRequest(keys=keys or [], request_id=request_id)
        async with self._channel(endpoint) as channel:
            try:
                stub = tensor_grpc.TensorServiceStub(channel)
                return (await stub.ReleaseTensors(request, timeout=self._progress_s)).released
            except grpc.aio.AioRpcError as error:
                raise MeshError.from_rpc_error(error) from error

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
        buffer: Array = np.empty(ref.size_bytes, dtype=np.uint8)
        received = _Received(buffer)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with self._channel(ref.endpoint) as channel:
                    await self._stream(channel, ref, received)
                break
            except MeshError as error:
                if not error.retryable or attempt == ATTEMPTS:
                    raise
            await asyncio.sleep(random.uniform(0, _FIRST_BACKOFF_S * 2**attempt))
        expected = received.expected if received.expected is not None else ref.crc32
        if received.crc32 != expected:
            raise MeshError(
                Reason.TENSOR_CORRUPT,
                f"tensor {ref.key!r} from {ref.endpoint}: CRC-32 is {received.crc32:08x}, not {expected:08x}",
                key=ref.key,
                endpoint=ref.endpoint,
            )
        return from_buffer(buffer, ref.dtype, ref.shape)

    async def _stream(self, channel: grpc.aio.Channel, ref: tensor_pb.TensorRef, received: _Received) -> None:
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
                    received.add(*decode_chunk(message), ref.key)
                    deadline.reschedule(loop.time() + self._progress_s)
        except DecodeError as error:
            raise MeshError(Reason.TENSOR_CORRUPT, f"{ref.endpoint} sent what is no chunk: {error}") from error
        except TimeoutError:
            raise MeshError(Reason.UNREACHABLE, f"{ref.endpoint} sent nothing for {self._progress_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise MeshError.from_rpc_error(error) from error
        finally:
            call.cancel()
        if received.missing:
            raise MeshError(Reason.UNREACHABLE, f"{ref.endpoint} ended {received.missing} bytes early", key=ref.key)

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


class _Received:
    """The bytes of a tensor so far, with their running CRC-32."""

    def __init__(self, buffer: Array) -> None:
        self._view = buffer.data
        self.size = 0
        self.crc32 = 0
        self.expected: int | None = None

    @property
    def missing(self) -> int:
        return len(self._view) - self.size

    def add(self, data: memoryview, expected: int | None, key: str) -> None:
        if len(data) > self.missing:
            raise MeshError(Reason.TENSOR_CORRUPT, f"tensor {key!r} is longer than its reference says", key=key)
        self._view[self.size : self.size + len(data)] = data
        self.size += len(data)
        self.crc32 = crc32(data, self.crc32)
        self.expected = expected if expected is not None else self.expected

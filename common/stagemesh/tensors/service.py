"""TensorService: hands out what a store keeps."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from stagemesh.rpc.errors import MeshError, invalid
from stagemesh.tensors.store import ON_LOOP_BELOW_BYTES, TensorReader, TensorStore
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh.v1 import tensor_pb2_grpc as tensor_grpc

CHUNK_BYTES = 256 << 10
"""Fastest for grpc.aio: larger chunks wait on each other, smaller ones cost a call each (256 KiB)."""


class TensorServicer(tensor_grpc.TensorServiceServicer):
    """Serves one store."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    async def FetchTensor(
        self, request: tensor_pb.FetchTensorRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[tensor_pb.FetchTensorResponse]:
        """Stream a tensor's bytes from `offset_bytes` on; the last chunk has the checksum of all."""
        try:
            with self._store.reading(request.key, request.owner_incarnation) as reader:
                if request.offset_bytes > reader.size:
                    raise invalid("offset_bytes", request.offset_bytes, f"the tensor has {reader.size} bytes")
                async for chunk in _chunks(reader, request.offset_bytes):
                    yield chunk
        except MeshError as error:
            await error.abort(context)

    async def ReleaseTensors(
        self, request: tensor_pb.ReleaseTensorsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tensor_pb.ReleaseTensorsResponse:
        """Drop tensors by key, by request, or both."""
        released, unknown = self._store.release(request.keys)
        if request.request_id:
            released += self._store.release_request(request.request_id)
        return tensor_pb.ReleaseTensorsResponse(released=released, unknown=unknown)


async def _chunks(reader: TensorReader, offset: int) -> AsyncIterator[tensor_pb.FetchTensorResponse]:
    whole = reader.known_crc32
    if whole is None and offset > 0:  # somebody goes on after a break, and the first part's sum is not known
        large = reader.size > ON_LOOP_BELOW_BYTES
        whole = await asyncio.to_thread(reader.compute_crc32) if large else reader.compute_crc32()
    running = 0
    while True:
        data = reader.read(offset, CHUNK_BYTES)
        offset += len(data)
        if whole is None:
            running = zlib.crc32(data, running)
        if offset < reader.size and data:
            yield tensor_pb.FetchTensorResponse(data=data)
            continue
        if whole is None:
            reader.remember_crc32(running)
            whole = running
        yield tensor_pb.FetchTensorResponse(data=data, crc32=whole)
        return

"""TensorService: hands out what a store keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from stagemesh.rpc.errors import MeshError, invalid
from stagemesh.tensors.checksum import crc32
from stagemesh.tensors.chunks import encode_chunk
from stagemesh.tensors.store import ON_LOOP_BELOW_BYTES, TensorReader, TensorStore
from stagemesh.v1 import tensor_pb2 as tensor_pb

CHUNK_BYTES = 256 << 10
"""Fastest for grpc.aio: larger chunks wait on each other, smaller ones cost a call each (256 KiB)."""
SERVICE = tensor_pb.DESCRIPTOR.services_by_name["TensorService"].full_name
FETCH_METHOD = f"/{SERVICE}/FetchTensor"


class TensorServicer:
    """Serves one store. Its chunks come serialized: add it with `add_to_server`, not with generated code."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Serve TensorService on `server`."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "FetchTensor": grpc.unary_stream_rpc_method_handler(
                self.FetchTensor, request_deserializer=tensor_pb.FetchTensorRequest.FromString
            ),
            "ReleaseTensors": grpc.unary_unary_rpc_method_handler(
                self.ReleaseTensors,
                request_deserializer=tensor_pb.ReleaseTensorsRequest.FromString,
                response_serializer=tensor_pb.ReleaseTensorsResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def FetchTensor(
        self, request: tensor_pb.FetchTensorRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        """Stream a tensor's bytes from `offset_bytes` on; the last chunk has the checksum of all."""
        try:
            reader = self._store.read(request.key, request.owner_incarnation)
            if request.offset_bytes > reader.size:
                raise invalid("offset_bytes", request.offset_bytes, f"the tensor has {reader.size} bytes")
        except MeshError as error:
            await error.abort(context)
        async for chunk in _chunks(reader, request.offset_bytes):
            yield chunk

    async def ReleaseTensors(
        self, request: tensor_pb.ReleaseTensorsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tensor_pb.ReleaseTensorsResponse:
        """Drop tensors by key, by request, or both."""
        released, unknown = self._store.release(request.keys)
        if request.request_id:
            released += self._store.release_request(request.request_id)
        return tensor_pb.ReleaseTensorsResponse(released=released, unknown=unknown)


async def _chunks(reader: TensorReader, offset: int) -> AsyncIterator[bytes]:
    whole = reader.known_crc32
    if whole is None and offset > 0:  # somebody goes on after a break, and the first part's sum is not known
        large = reader.size > ON_LOOP_BELOW_BYTES
        whole = await asyncio.to_thread(reader.compute_crc32) if large else reader.compute_crc32()
    running = 0
    while True:
        data = reader.data[offset : offset + CHUNK_BYTES]
        offset += len(data)
        if whole is None:
            running = crc32(data, running)
        if offset < reader.size:
            yield encode_chunk(data)
            continue
        if whole is None:
            reader.remember_crc32(running)
            whole = running
        yield encode_chunk(data, whole)
        return

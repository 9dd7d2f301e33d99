"""Brings outputs that replicas keep to the clients that hold their references, chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import open_bulk_channel
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh_head.links.manager import LinkManager

MAX_FETCHES = 64
"""At once; each holds a connection and a few chunks."""
PROGRESS_S = 30.0
"""A fetch of which nothing moves for so long is given up, in seconds."""
METHOD = f"/{tensor_pb.DESCRIPTOR.services_by_name['TensorService'].full_name}/FetchTensor"

Write = Callable[[inference_pb.FetchOutputResponse], Awaitable[object]]


class OutputRelay:
    """Fetches by a reference's key and its owner's incarnation: where the owner is, the head knows itself."""

    def __init__(self, links: LinkManager) -> None:
        self._links = links
        self.running = 0
        """Fetches at this moment."""

    async def send(self, request: inference_pb.FetchOutputRequest, write: Write) -> None:
        """Give an output's chunks to `write`; nothing is read ahead of a slow client.

        Raises:
            MeshError: INVALID_REQUEST, TENSOR_GONE, OVERLOADED, UNREACHABLE, or REQUEST_TIMEOUT when one of both ends
                stops.
        """
        ref = request.ref
        for name in ("key", "owner_incarnation"):
            if not getattr(ref, name):
                raise MeshError(Reason.INVALID_REQUEST, f"ref.{name}: is missing", field=f"ref.{name}")
        endpoint = next(
            (link.endpoint for link in self._links.links() if link.incarnation == ref.owner_incarnation), None
        )
        if endpoint is None:
            raise MeshError(Reason.TENSOR_GONE, f"tensor {ref.key!r}: the replica that kept it is gone", key=ref.key)
        if self.running >= MAX_FETCHES:
            raise MeshError(Reason.OVERLOADED, f"{MAX_FETCHES} outputs are being fetched already")
        self.running += 1
        channel = open_bulk_channel(endpoint)
        # The same fields by the same numbers: nothing is taken apart but the message itself.
        fetch: grpc.aio.UnaryStreamMultiCallable[tensor_pb.FetchTensorRequest, inference_pb.FetchOutputResponse] = (
            channel.unary_stream(
                METHOD,
                request_serializer=tensor_pb.FetchTensorRequest.SerializeToString,
                response_deserializer=inference_pb.FetchOutputResponse.FromString,
            )
        )
        call = fetch(
            tensor_pb.FetchTensorRequest(
                key=ref.key, owner_incarnation=ref.owner_incarnation, offset_bytes=request.offset_bytes
            )
        )
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PROGRESS_S) as deadline:
                async for chunk in call:
                    await write(chunk)
                    deadline.reschedule(loop.time() + PROGRESS_S)
        except TimeoutError:
            problem = f"tensor {ref.key!r}: nothing went through for {PROGRESS_S:g} s"
            raise MeshError(Reason.REQUEST_TIMEOUT, problem, key=ref.key) from None
        except grpc.aio.AioRpcError as error:
            raise MeshError.from_rpc_error(error) from error
        finally:
            self.running -= 1
            call.cancel()
            await channel.close()

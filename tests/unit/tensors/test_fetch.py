"""A consumer gets the producer's bytes, by mapping or over gRPC, whole or not at all."""

from __future__ import annotations

import asyncio
import os
import sys
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import open_channel
from stagemesh.rpc.server import bind, create_server
from stagemesh.tensors import TensorResolver, TensorServicer, TensorStore, encode, fetch, segments
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh.v1 import tensor_pb2_grpc as tensor_grpc

ARRAY = np.random.default_rng(1).standard_normal((700, 1000)).astype(np.float32)  # 2.8 MB, eleven chunks


class CountingServicer(TensorServicer):
    """Counts fetches; breaks those of `breaks` after that many chunks; changes a byte when `corrupts`."""

    def __init__(self, store: TensorStore) -> None:
        super().__init__(store)
        self.offsets: list[int] = []
        self.breaks: list[int] = []
        self.corrupts = False
        self.stall = False

    async def FetchTensor(
        self, request: tensor_pb.FetchTensorRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        self.offsets.append(request.offset_bytes)
        left = self.breaks.pop(0) if self.breaks else -1
        async for chunk in super().FetchTensor(request, context):
            if left == 0:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the network broke")
            if self.stall:
                await asyncio.Event().wait()
            if self.corrupts:
                chunk = chunk[:100] + bytes([chunk[100] ^ 1]) + chunk[101:]
            left -= 1
            yield chunk


@dataclass
class Owner:
    store: TensorStore
    servicer: CountingServicer


@pytest.fixture
async def owner() -> AsyncIterator[Owner]:
    store = TensorStore(host_id="host-a", incarnation="one")
    servicer = CountingServicer(store)
    server = create_server()
    port = bind(server, "127.0.0.1:0")
    servicer.add_to_server(server)
    await server.start()
    store.endpoint = f"127.0.0.1:{port}"
    yield Owner(store, servicer)
    await server.stop(0)
    store.close()
    assert segments.names_of(os.getpid()) == []


@pytest.fixture
async def near() -> AsyncIterator[TensorResolver]:
    resolver = TensorResolver(host_id="host-a")
    yield resolver
    await resolver.close()


@pytest.fixture
async def far() -> AsyncIterator[TensorResolver]:
    resolver = TensorResolver(host_id="host-b", progress_s=5.0)
    yield resolver
    await resolver.close()


async def test_on_the_same_host_the_segment_is_mapped_without_a_copy_or_a_call(
    owner: Owner, near: TensorResolver
) -> None:
    value = await owner.store.put_async("r", ARRAY)
    array = await near.resolve(value)
    assert np.array_equal(array, ARRAY)
    assert owner.servicer.offsets == []
    assert not array.flags.writeable
    assert value.ref.shared_memory in await asyncio.to_thread(Path("/proc/self/maps").read_text)


async def test_a_mapped_array_survives_its_release(owner: Owner, near: TensorResolver) -> None:
    value = owner.store.put("r", ARRAY)
    array = await near.resolve(value)
    owner.store.release_request("r")
    assert np.array_equal(array, ARRAY)


async def test_from_another_host_it_is_fetched_in_chunks(owner: Owner, far: TensorResolver) -> None:
    array = await far.resolve(owner.store.put("r", ARRAY))
    assert np.array_equal(array, ARRAY)
    assert owner.servicer.offsets == [0]
    assert not array.flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(64 << 10, np.uint8),
        np.arange(256 << 10, dtype=np.uint8),  # exactly one chunk
        np.arange((256 << 10) + 1, dtype=np.uint8),
        np.arange(3 * (256 << 10), dtype=np.uint8).reshape(3, -1),
    ],
    ids=["small", "one chunk", "a byte more", "three chunks"],
)
async def test_chunk_boundaries_lose_nothing(
    owner: Owner, far: TensorResolver, array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
) -> None:
    assert np.array_equal(await far.resolve(owner.store.put("r", array)), array)


async def test_inline_needs_nobody(far: TensorResolver) -> None:
    array = await far.resolve(tensor_pb.TensorValue(inline=encode(ARRAY[:2])))
    assert np.array_equal(array, ARRAY[:2])


async def test_a_broken_fetch_goes_on_where_it_stopped(owner: Owner, far: TensorResolver) -> None:
    owner.servicer.breaks = [3, 0, 5]
    array = await far.resolve(owner.store.put("r", ARRAY))
    assert np.array_equal(array, ARRAY)
    first, second, third, fourth = owner.servicer.offsets
    assert (first, second, third) == (0, 3 << 18, 3 << 18)
    assert fourth == 8 << 18


async def test_a_fetch_that_always_breaks_ends_with_an_error(
    owner: Owner, far: TensorResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_FIRST_BACKOFF_S", 0.001)
    owner.servicer.breaks = [1] * 100
    with pytest.raises(MeshError) as caught:
        await far.resolve(owner.store.put("r", ARRAY))
    assert caught.value.retryable
    assert len(owner.servicer.offsets) == fetch.ATTEMPTS


async def test_a_client_made_from_the_contract_alone_reads_it_too(owner: Owner) -> None:
    ref = owner.store.put("r", ARRAY).ref
    async with open_channel(owner.store.endpoint) as channel:
        stub = tensor_grpc.TensorServiceStub(channel)
        chunks = [chunk async for chunk in stub.FetchTensor(tensor_pb.FetchTensorRequest(key=ref.key), timeout=30)]
    assert b"".join(chunk.data for chunk in chunks) == ARRAY.tobytes()
    assert [chunk.HasField("crc32") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].crc32 == zlib.crc32(ARRAY.tobytes())


async def test_an_owner_that_speaks_by_generated_code_is_understood(far: TensorResolver) -> None:
    class Plain(tensor_grpc.TensorServiceServicer):
        async def FetchTensor(
            self, request: tensor_pb.FetchTensorRequest, context: grpc.aio.ServicerContext
        ) -> AsyncIterator[tensor_pb.FetchTensorResponse]:
            yield tensor_pb.FetchTensorResponse(data=ARRAY.tobytes()[:1000])
            yield tensor_pb.FetchTensorResponse()
            yield tensor_pb.FetchTensorResponse(data=ARRAY.tobytes()[1000:4000])
            yield tensor_pb.FetchTensorResponse(crc32=zlib.crc32(ARRAY.tobytes()[:4000]))

    server = create_server()
    port = bind(server, "127.0.0.1:0")
    tensor_grpc.add_TensorServiceServicer_to_server(Plain(), server)
    await server.start()
    ref = tensor_pb.TensorRef(endpoint=f"127.0.0.1:{port}", key="k", dtype="float32", shape=[1000], size_bytes=4000)
    try:
        assert np.array_equal(await far.resolve_ref(ref), ARRAY[0])
    finally:
        await server.stop(0)


async def test_a_changed_byte_is_seen(owner: Owner, far: TensorResolver) -> None:
    owner.servicer.corrupts = True
    with pytest.raises(MeshError) as caught:
        await far.resolve(owner.store.put("r", ARRAY))
    assert caught.value.reason is Reason.TENSOR_CORRUPT


async def test_an_owner_that_stands_still_is_given_up(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_FIRST_BACKOFF_S", 0.001)
    owner.servicer.stall = True
    resolver = TensorResolver(host_id="host-b", progress_s=0.1)
    try:
        with pytest.raises(MeshError, match="sent nothing") as caught:
            await resolver.resolve(owner.store.put("r", ARRAY))
        assert caught.value.reason is Reason.UNREACHABLE
    finally:
        await resolver.close()


async def test_a_released_tensor_is_gone_for_everybody(owner: Owner, near: TensorResolver, far: TensorResolver) -> None:
    value = owner.store.put("r", ARRAY)
    async with open_channel(owner.store.endpoint) as channel:
        request = tensor_pb.ReleaseTensorsRequest(keys=[value.ref.key, "unknown"])
        answer = await tensor_grpc.TensorServiceStub(channel).ReleaseTensors(request)
    assert (answer.released, answer.unknown) == (1, 1)
    for resolver in (near, far):
        with pytest.raises(MeshError) as caught:
            await resolver.resolve(value)
        assert caught.value.reason is Reason.TENSOR_GONE


async def test_a_restarted_owner_refuses_an_old_reference(owner: Owner, far: TensorResolver) -> None:
    value = owner.store.put("r", ARRAY)
    value.ref.owner_incarnation = "zero"
    with pytest.raises(MeshError) as caught:
        await far.resolve(value)
    assert caught.value.reason is Reason.STALE_INCARNATION


async def test_a_segment_that_is_not_there_after_all_is_fetched(owner: Owner, near: TensorResolver) -> None:
    value = owner.store.put("r", ARRAY)
    value.ref.shared_memory = value.ref.shared_memory[:-16] + "0" * 16
    assert np.array_equal(await near.resolve(value), ARRAY)
    assert owner.servicer.offsets == [0]


async def test_a_reference_that_lies_about_its_size_is_refused_before_anything_is_read(
    owner: Owner, far: TensorResolver
) -> None:
    value = owner.store.put("r", ARRAY)
    value.ref.shape[:] = [1 << 40]
    with pytest.raises(MeshError) as caught:
        await far.resolve(value)
    assert caught.value.metadata["field"] == "tensor.size_bytes"
    value.ref.size_bytes = 1 << 42
    with pytest.raises(MeshError, match="at most"):
        await far.resolve(value)
    assert owner.servicer.offsets == []


async def test_a_tensor_longer_than_its_reference_is_refused(owner: Owner, far: TensorResolver) -> None:
    value = owner.store.put("r", ARRAY)
    value.ref.shape[:] = [699, 1000]
    value.ref.size_bytes = 699 * 4000
    with pytest.raises(MeshError) as caught:
        await far.resolve(value)
    assert caught.value.reason is Reason.TENSOR_CORRUPT


async def test_an_offset_beyond_the_end_is_refused(owner: Owner) -> None:
    key = owner.store.put("r", ARRAY).ref.key
    async with open_channel(owner.store.endpoint) as channel:
        call = tensor_grpc.TensorServiceStub(channel).FetchTensor(
            tensor_pb.FetchTensorRequest(key=key, offset_bytes=ARRAY.nbytes + 1), timeout=10
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_concurrent_fetches_share_a_connection_and_do_not_mix(owner: Owner, far: TensorResolver) -> None:
    arrays = [ARRAY + number for number in range(8)]
    values = [owner.store.put("r", array) for array in arrays]
    got = await asyncio.gather(*(far.resolve(value) for value in values))
    assert all(np.array_equal(left, right) for left, right in zip(got, arrays, strict=True))


async def test_an_owner_that_died_leaves_nothing_after_the_sweep(far: TensorResolver) -> None:
    script = (
        "import sys, numpy as np\n"
        "from stagemesh.tensors import TensorStore\n"
        "store = TensorStore(host_id='host-a', incarnation='one')\n"
        "store.endpoint = '127.0.0.1:9'\n"
        "value = store.put('r', np.arange(1 << 16, dtype=np.float32))\n"
        "sys.stdout.buffer.write(value.SerializeToString()); sys.stdout.flush(); sys.stdin.read()\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    value = tensor_pb.TensorValue.FromString(await asyncio.wait_for(process.stdout.read(4096), 60))
    near = TensorResolver(host_id="host-a")
    mapped = await near.resolve(value)
    process.kill()
    await asyncio.wait_for(process.communicate(), 30)
    assert value.ref.shared_memory in segments.sweep()
    assert np.array_equal(mapped, np.arange(1 << 16, dtype=np.float32))  # who had it keeps it
    await near.close()

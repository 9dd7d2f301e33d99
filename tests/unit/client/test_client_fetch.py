"""A fetch goes on where its stream broke, and takes no wrong bytes."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from stagemesh import InvalidRequest, Reference, RequestTimeout, StageLost, TensorFrame, Unreachable
from stagemesh.client.decode import decode
from stagemesh.client.errors import NotFound
from stagemesh.client.fetch import Fetch
from stagemesh.rpc.errors import Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb

ARRAY = np.arange(600, dtype=np.float32).reshape(20, 30)
DATA = ARRAY.tobytes()
BROKEN = Unreachable(Reason.UNREACHABLE, "the stream broke")


def reference(dtype: str = "float32", shape: tuple[int, ...] = (20, 30)) -> Reference:
    output = frame_pb.TensorOutput(name="latent")
    ref = output.value.ref
    ref.key, ref.owner_incarnation, ref.dtype, ref.size_bytes = "k", "one", dtype, len(DATA)
    ref.shape.extend(shape)
    found = decode(inference_pb.GenerateResponse(request_id="r", sequence=2, frame=frame_pb.Frame(tensor=output)))
    assert isinstance(found, Reference)
    return found


def chunk(data: bytes, crc32: int | None = None) -> inference_pb.FetchOutputResponse:
    return inference_pb.FetchOutputResponse(data=data, crc32=crc32)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_broken_stream_is_taken_up_at_its_offset() -> None:
    fetch = Fetch(reference(), 60)
    assert fetch.next_call()[0].offset_bytes == 0
    fetch.accept(chunk(DATA[:1000]))
    assert fetch.delay_after(BROKEN) == 1.0, "what the catalogue says"
    message, _ = fetch.next_call()
    assert (message.offset_bytes, message.ref.key, message.ref.owner_incarnation) == (1000, "k", "one")
    fetch.accept(chunk(DATA[1000:], zlib.crc32(DATA)))
    brought = fetch.result()
    assert isinstance(brought, TensorFrame)
    np.testing.assert_array_equal(brought.array, ARRAY)


def test_bfloat16_comes_as_its_bits() -> None:
    fetch = Fetch(reference("bfloat16", (1200,)), 60)
    fetch.accept(chunk(DATA, zlib.crc32(DATA)))
    brought = fetch.result()
    assert isinstance(brought, TensorFrame)
    assert (brought.dtype, brought.array.dtype, brought.array.shape) == ("bfloat16", np.uint16, (1200,))


def test_it_gives_up_after_some_calls_and_at_once_when_the_tensor_is_gone() -> None:
    fetch = Fetch(reference(), 60)
    for _ in range(3):
        fetch.next_call()
        fetch.delay_after(BROKEN)
    fetch.next_call()
    with pytest.raises(Unreachable):
        fetch.delay_after(BROKEN)
    fetch = Fetch(reference(), 60)
    fetch.next_call()
    with pytest.raises(NotFound):
        fetch.delay_after(NotFound(Reason.TENSOR_GONE, "it is gone"))


def test_it_ends_at_its_deadline() -> None:
    clock = Clock()
    fetch = Fetch(reference(), 5, clock)
    assert fetch.next_call()[1] == 5
    clock.now = 4.9
    with pytest.raises(Unreachable):
        fetch.delay_after(BROKEN)
    clock.now = 5
    with pytest.raises(RequestTimeout, match="did not come within 5 s"):
        fetch.next_call()


def test_wrong_bytes_are_not_taken_for_an_output() -> None:
    fetch = Fetch(reference(), 60)
    fetch.accept(chunk(DATA, zlib.crc32(DATA) ^ 1))
    with pytest.raises(StageLost, match="CRC-32"):
        fetch.result()
    fetch = Fetch(reference(), 60)
    with pytest.raises(StageLost, match="longer than its reference says"):
        fetch.accept(chunk(DATA + b"x"))
    fetch = Fetch(reference(), 60)
    fetch.accept(chunk(DATA[:-1]))
    with pytest.raises(Unreachable, match="1 bytes early"):
        fetch.result()
    left = reference()
    left.message.tensor.value.ref.size_bytes = 7
    with pytest.raises(InvalidRequest, match="takes 2400 bytes"):
        Fetch(left, 60)

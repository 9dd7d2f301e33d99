"""Chunks made and read by hand are what the protobuf runtime makes and reads."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.tensors.chunks import decode_chunk, encode_chunk
from stagemesh.v1 import tensor_pb2 as tensor_pb

CRC32 = st.none() | st.integers(0, (1 << 32) - 1)
# The length takes one, two, three or four bytes on the wire.
DATA = st.binary(max_size=40) | st.sampled_from([127, 128, 16383, 16384, 262144, 2097152]).map(bytes)


@given(DATA, CRC32)
def test_a_chunk_is_byte_for_byte_the_runtimes(data: bytes, crc32: int | None) -> None:
    assert encode_chunk(memoryview(data), crc32) == (
        tensor_pb.FetchTensorResponse(data=data, crc32=crc32).SerializeToString()
    )


@given(DATA, CRC32)
def test_the_runtimes_message_is_read(data: bytes, crc32: int | None) -> None:
    message = tensor_pb.FetchTensorResponse(data=data, crc32=crc32).SerializeToString()
    assert decode_chunk(message) == (data, crc32)


def test_fields_in_another_order_or_unknown_are_read_too() -> None:
    assert decode_chunk(b"\x15\x01\x00\x00\x00\x0a\x02hi") == (b"hi", 1)
    assert decode_chunk(b"\x0a\x02hi\x1a\x01x") == (b"hi", None)
    assert decode_chunk(b"\x0a\x02hi\x15\x01\x00\x00\x00\x1a\x01x") == (b"hi", 1)


@given(st.binary(max_size=30))
def test_junk_is_read_as_the_runtime_reads_it(message: bytes) -> None:
    try:
        expected = tensor_pb.FetchTensorResponse.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            decode_chunk(message)
    else:
        assert decode_chunk(message) == (expected.data, expected.crc32 if expected.HasField("crc32") else None)

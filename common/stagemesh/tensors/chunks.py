"""The chunks of a fetch on the wire, encoded and decoded by hand.

They are `FetchTensorResponse` messages, byte for byte. The protobuf runtime copies a chunk once more on each side, into
fresh memory; with a quarter of a megabyte a message that costs more than the network (benchmarks/tensors.py).
"""

from __future__ import annotations

import struct

from stagemesh.v1 import tensor_pb2 as tensor_pb

_DATA_TAG = b"\x0a"  # field 1, length-delimited
_CRC32_TAG = b"\x15"  # field 2, fixed32
_FIXED32 = struct.Struct("<I")


def encode_chunk(data: bytes | memoryview, crc32: int | None = None) -> bytes:
    """A serialized FetchTensorResponse, made with a single copy of `data`."""
    parts: list[bytes | memoryview] = [_DATA_TAG, _varint(len(data)), data] if len(data) else []
    if crc32 is not None:
        parts += [_CRC32_TAG, _FIXED32.pack(crc32)]
    return b"".join(parts)


def decode_chunk(message: bytes) -> tuple[memoryview, int | None]:
    """The data of a serialized FetchTensorResponse, as a view, and its checksum.

    Raises:
        google.protobuf.message.DecodeError: it is none.
    """
    if message[:1] == _DATA_TAG:
        length, start = _read_varint(message)
        rest = len(message) - start - length
        if rest == 0:
            return memoryview(message)[start:], None
        if rest == 5 and message[-5:-4] == _CRC32_TAG:
            return memoryview(message)[start : start + length], _FIXED32.unpack_from(message, len(message) - 4)[0]
    # Another order of the fields, fields of a later version: rare, and the runtime's business.
    parsed = tensor_pb.FetchTensorResponse.FromString(message)
    return memoryview(parsed.data), parsed.crc32 if parsed.HasField("crc32") else None


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _read_varint(message: bytes) -> tuple[int, int]:
    """The number after the tag and where it ends; more than the message holds when it is cut off."""
    number, shift = 0, 0
    for position in range(1, min(len(message), 11)):
        byte = message[position]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position + 1
        shift += 7
    return len(message) + 1, 1

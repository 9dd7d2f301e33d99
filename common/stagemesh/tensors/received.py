"""The bytes of one tensor as they come in, in order, over one stream or several that go on from each other."""

from __future__ import annotations

import numpy as np

from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.tensors.checksum import crc32
from stagemesh.tensors.codec import Array, size_bytes
from stagemesh.v1 import tensor_pb2 as tensor_pb

MAX_TENSOR_BYTES = 4 << 30
"""Largest tensor that is fetched (4 GiB): a wrong reference must not take all memory."""


def check_size(ref: tensor_pb.TensorRef, max_bytes: int = MAX_TENSOR_BYTES) -> None:
    """Refuse a reference whose parts do not fit each other, or that is too large.

    Raises:
        MeshError: INVALID_REQUEST.
    """
    size = size_bytes(ref.dtype, ref.shape)
    if size != ref.size_bytes:
        raise invalid("tensor.size_bytes", ref.size_bytes, f"{ref.dtype} {list(ref.shape)} takes {size} bytes")
    if size > max_bytes:
        raise invalid("tensor.size_bytes", size, f"at most {max_bytes} are fetched")


class Received:
    """The bytes so far, with their running CRC-32."""

    def __init__(self, ref: tensor_pb.TensorRef, source: str) -> None:
        """`source` says where it comes from, for errors. Memory is taken at once: `check_size` before."""
        self._ref = ref
        self._source = source
        self._buffer: Array = np.empty(ref.size_bytes, dtype=np.uint8)
        self._view = self._buffer.data
        self._crc32 = 0
        self._expected: int | None = None
        self.size = 0
        """Bytes that came: the offset to go on from."""

    def add(self, data: memoryview | bytes, expected: int | None) -> None:
        """The next bytes, with the checksum of all when they are the last. Raises MeshError(TENSOR_CORRUPT)."""
        if len(data) > len(self._view) - self.size:
            raise self._corrupt("is longer than its reference says")
        self._view[self.size : self.size + len(data)] = data
        self.size += len(data)
        self._crc32 = crc32(data, self._crc32)
        self._expected = expected if expected is not None else self._expected

    def check_end(self) -> None:
        """Refuse an end before all bytes came. Raises MeshError(UNREACHABLE)."""
        if missing := len(self._view) - self.size:
            raise MeshError(Reason.UNREACHABLE, f"{self._source} ended {missing} bytes early", key=self._ref.key)

    def verified(self) -> Array:
        """All bytes, uint8. Raises MeshError(TENSOR_CORRUPT) when their checksum is another."""
        expected = self._expected if self._expected is not None else self._ref.crc32
        if self._crc32 != expected:
            raise self._corrupt(f"CRC-32 is {self._crc32:08x}, not {expected:08x}")
        return self._buffer

    def _corrupt(self, problem: str) -> MeshError:
        text = f"tensor {self._ref.key!r} from {self._source}: {problem}"
        return MeshError(Reason.TENSOR_CORRUPT, text, key=self._ref.key, endpoint=self._source)

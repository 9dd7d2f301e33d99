"""NumPy arrays to `Tensor` messages and back. Row-major, little-endian, named by NumPy's type names.

NumPy has no bfloat16: such tensors are arrays of uint16 on the way in (`encode(bits, dtype="bfloat16")`) and float32 on
the way out, the only type that is converted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stagemesh.rpc.errors import MeshError, invalid
from stagemesh.v1 import tensor_pb2 as tensor_pb

Array = np.ndarray[Any, Any]

BFLOAT16 = "bfloat16"
MAX_DIMENSIONS = 32
"""As many as NumPy 1 has."""

_NUMPY_NAMES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_STORED: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name).newbyteorder("<") for name in _NUMPY_NAMES},
    BFLOAT16: np.dtype("<u2"),
}
"""Type name -> type of the stored elements."""


def dtype_names() -> tuple[str, ...]:
    """The type names that a tensor may have."""
    return tuple(_STORED)


def prepare(array: Array, dtype: str | None = None) -> tuple[Array, str]:
    """The array as it is stored, copied only when it is not contiguous or not little-endian, and its type name.

    Args:
        dtype: "bfloat16" when `array` holds its bits as uint16.

    Raises:
        MeshError: the type has no place on the wire.
    """
    name = dtype or array.dtype.name
    stored = _STORED.get(name)
    if stored is None:
        raise invalid("tensor.dtype", name, f"must be one of {', '.join(_STORED)}")
    if array.ndim > MAX_DIMENSIONS:
        raise invalid("tensor.shape", array.ndim, f"at most {MAX_DIMENSIONS} dimensions")
    if name == BFLOAT16 and array.dtype.name == BFLOAT16:  # the type of the package ml_dtypes
        array = array.view(np.uint16)
    if array.dtype.newbyteorder("=") != stored.newbyteorder("="):
        raise invalid("tensor.dtype", name, f"the array's elements are {array.dtype.name}")
    # ascontiguousarray makes a scalar an array of one dimension
    return np.ascontiguousarray(array, dtype=stored).reshape(array.shape), name


def as_bytes(array: Array) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def encode(array: Array, dtype: str | None = None) -> tensor_pb.Tensor:
    """An array as an inline tensor; arguments and errors as of `prepare`."""
    stored, name = prepare(array, dtype)
    return tensor_pb.Tensor(dtype=name, shape=stored.shape, data=stored.tobytes())


def decode(tensor: tensor_pb.Tensor) -> Array:
    """An inline tensor as a read-only array; a view of the message's bytes, but for bfloat16.

    Raises:
        MeshError: INVALID_REQUEST: type, shape and length do not fit each other.
    """
    return from_buffer(tensor.data, tensor.dtype, tensor.shape)


def from_buffer(data: Any, dtype: str, shape: Sequence[int]) -> Array:
    """An array over `data`, which holds exactly the elements of `shape`; read-only, a view but for bfloat16.

    Raises:
        MeshError: as `decode`.
    """
    size = size_bytes(dtype, shape)
    length = memoryview(data).nbytes
    if length != size:
        raise invalid("tensor.data", f"{length} bytes", f"{dtype} {list(shape)} takes {size} bytes")
    array: Array = np.frombuffer(data, dtype=_STORED[dtype]).reshape(tuple(shape))
    if dtype == BFLOAT16:
        return bfloat16_to_float32(array)
    array.flags.writeable = False
    return array


def size_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Length of a tensor in bytes.

    Raises:
        MeshError: INVALID_REQUEST: there is no such type or shape.
    """
    stored = _STORED.get(dtype)
    if stored is None:
        raise invalid("tensor.dtype", dtype, f"must be one of {', '.join(_STORED)}")
    if len(shape) > MAX_DIMENSIONS or any(side < 0 for side in shape):
        raise invalid("tensor.shape", list(shape)[: MAX_DIMENSIONS + 1], "sides must be 0 or more")
    return math.prod(shape) * stored.itemsize


def bfloat16_to_float32(bits: Array) -> Array:
    """Exact: bfloat16 is the upper half of a float32. `bits` is uint16 of any shape."""
    wide: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    wide.flags.writeable = False
    return wide


def float32_to_bfloat16(array: Array) -> Array:
    """The nearest bfloat16 of each element as uint16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, np.uint16(0x7FC0), rounded).reshape(array.shape)


__all__ = [
    "BFLOAT16", "Array", "MeshError", "as_bytes", "bfloat16_to_float32", "decode", "dtype_names", "encode",
    "float32_to_bfloat16", "from_buffer", "prepare", "size_bytes",
]  # fmt: skip

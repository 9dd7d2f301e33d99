"""Arrays survive the wire exactly, and what is no tensor is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.tensors import codec
from stagemesh.v1 import tensor_pb2 as tensor_pb

WIRE_TYPES = [name for name in codec.dtype_names() if name != codec.BFLOAT16]

arrays = st.sampled_from(WIRE_TYPES).flatmap(
    lambda name: hnp.arrays(
        st.sampled_from([np.dtype(name), np.dtype(name).newbyteorder(">")]),
        hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=5),
    )
)


def same(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    return left.shape == right.shape and left.astype(left.dtype.newbyteorder("<")).tobytes() == right.tobytes()


@given(arrays)
def test_any_array_comes_back_bit_for_bit(array: np.ndarray[Any, Any]) -> None:
    wire = tensor_pb.Tensor.FromString(codec.encode(array).SerializeToString())
    back = codec.decode(wire)
    assert same(array, back)
    assert back.dtype.name == array.dtype.name
    assert not back.flags.writeable


@given(arrays.filter(lambda array: array.ndim >= 1 and array.size > 1))
def test_a_view_with_strides_comes_back_as_it_reads(array: np.ndarray[Any, Any]) -> None:
    strided = array[::-1].T
    assert same(np.ascontiguousarray(strided), codec.decode(codec.encode(strided)))


@given(st.binary(max_size=200), st.text(max_size=12), st.lists(st.integers(-3, 1 << 40), max_size=6))
def test_what_does_not_fit_is_refused_and_never_more(data: bytes, dtype: str, shape: list[int]) -> None:
    try:
        decoded = codec.decode(tensor_pb.Tensor(dtype=dtype, shape=shape, data=data))
    except MeshError as error:
        assert error.reason is Reason.INVALID_REQUEST
        assert error.metadata["field"].startswith("tensor.")
    else:
        assert list(decoded.shape) == shape


@pytest.mark.parametrize(
    ("tensor", "field"),
    [
        (tensor_pb.Tensor(dtype="float31", shape=[1], data=b"1234"), "tensor.dtype"),
        (tensor_pb.Tensor(dtype="object", shape=[1], data=b"12345678"), "tensor.dtype"),
        (tensor_pb.Tensor(dtype="float32", shape=[-1], data=b""), "tensor.shape"),
        (tensor_pb.Tensor(dtype="float32", shape=[2], data=b"1234"), "tensor.data"),
        (tensor_pb.Tensor(dtype="float32", shape=[1] * 33, data=b"1234"), "tensor.shape"),
    ],
)
def test_a_bad_tensor_is_refused_by_the_name_of_its_field(tensor: tensor_pb.Tensor, field: str) -> None:
    with pytest.raises(MeshError) as caught:
        codec.decode(tensor)
    assert caught.value.metadata["field"] == field


def test_objects_and_text_have_no_place_on_the_wire() -> None:
    for array in (np.array([object()]), np.array(["text"]), np.array(["2026-01-01"], dtype="datetime64[D]")):
        with pytest.raises(MeshError, match=r"tensor\.dtype"):
            codec.encode(array)


def test_decoding_copies_nothing() -> None:
    data = codec.encode(np.arange(1000)).data
    view = codec.from_buffer(data, "int64", [1000])
    address = view.__array_interface__["data"][0]
    assert address == np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]


@given(hnp.arrays(np.float32, 20, elements=st.floats(width=32)))
def test_bfloat16_is_the_nearest_one_and_arrives_as_float32(array: np.ndarray[Any, Any]) -> None:
    bits = codec.float32_to_bfloat16(array)
    back = codec.decode(codec.encode(bits, dtype="bfloat16"))
    assert back.dtype == np.float32
    assert np.array_equal(np.isnan(back), np.isnan(array))
    ordinary = np.isfinite(array) & (np.abs(array) < 3e38)
    # bfloat16 keeps 8 bits of the mantissa; below the normal numbers its steps are 2**-133.
    assert np.all(np.abs(back[ordinary] - array[ordinary]) <= np.maximum(np.abs(array[ordinary]) * 2**-8, 2.0**-134))
    # A bfloat16 is its own nearest.
    assert np.array_equal(codec.float32_to_bfloat16(back)[~np.isnan(back)], bits[~np.isnan(back)])


def test_bfloat16_ties_go_to_the_even_neighbour() -> None:
    halfway = np.array([0x3F808000, 0x3F818000], dtype=np.uint32).view(np.float32)
    assert codec.float32_to_bfloat16(halfway).tolist() == [0x3F80, 0x3F82]


def test_bits_that_are_not_uint16_are_no_bfloat16() -> None:
    with pytest.raises(MeshError, match=r"tensor\.dtype"):
        codec.encode(np.zeros(2, np.float32), dtype="bfloat16")

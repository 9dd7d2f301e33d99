"""Tensors between stages: `codec` turns arrays to bytes, a producer's `TensorStore` keeps large ones, a consumer's
`TensorResolver` maps or fetches them.

    value = store.put(request_id, array)        # inline, or a reference to shared memory
    array = await resolver.resolve(value)       # in another process, on this host or another
"""

from stagemesh.tensors.codec import decode, encode
from stagemesh.tensors.fetch import TensorResolver
from stagemesh.tensors.segments import sweep as sweep_segments
from stagemesh.tensors.service import TensorServicer
from stagemesh.tensors.store import TensorStore

__all__ = ["TensorResolver", "TensorServicer", "TensorStore", "decode", "encode", "sweep_segments"]

"""Large outputs that stay with this replica: kept for whoever is told of them, dropped when nobody will be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagemesh.references import reference_in
from stagemesh.tensors import TensorStore
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb

MEDIA_INLINE_BYTES = 4 << 20
"""Larger files stay here and travel by reference (4 MiB)."""


@dataclass(frozen=True, slots=True)
class Keeper:
    """What sinks need of the replica's store."""

    store: TensorStore

    def tensor(self, request_id: str, array: Any) -> tensor_pb.TensorValue:
        """A NumPy array inline, or as a reference into the store. Raises MeshError(OVERLOADED)."""
        return self.store.put(request_id, array)

    def media(self, request_id: str, media: frame_pb.MediaOutput) -> frame_pb.MediaOutput:
        """The same for an encoded file."""
        if len(media.data) < MEDIA_INLINE_BYTES:
            return media
        value = self.store.put(request_id, np.frombuffer(media.data, dtype=np.uint8))
        kept = frame_pb.MediaOutput()
        kept.CopyFrom(media)
        kept.ClearField("data")
        kept.ref.CopyFrom(value.ref)
        return kept

    def drop(self, events: Iterable[stage_pb.TaskEvent]) -> None:
        """Forget what events that will not be sent refer to: nobody else knows of it."""
        if keys := [ref.key for event in events if (ref := reference_in(event)) is not None]:
            self.store.release(keys)

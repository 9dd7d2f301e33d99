"""What an input adapter reads, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stagemesh.config import Stage
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh_worker.engines.base import EngineInput


@dataclass(frozen=True, slots=True)
class StageInput:
    """What one of the stages before has made: whole, or one chunk of it on an edge of mode stream."""

    stage: str
    """Name of that stage."""
    role: str = ""
    """Role of the companion that made it; empty for the request itself."""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    media: tuple[frame_pb.MediaOutput, ...] = ()
    """Files; their `data` is here, wherever it came from."""
    audio: Any = None
    """Raw sound as a NumPy array, [samples] or [samples, channels], or None."""
    sample_rate_hz: int = 0
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """NumPy arrays by name; read-only."""
    finished: bool = True
    """Nothing of that stage follows."""

    @property
    def is_empty(self) -> bool:
        """Whether the stage made nothing at all."""
        return not (self.text or self.token_ids or self.media or self.tensors) and self.audio is None

    @property
    def size_bytes(self) -> int:
        """Bytes of all that it holds; 4 for a token id."""
        arrays = [*self.tensors.values(), *([] if self.audio is None else [self.audio])]
        files = sum(len(item.data) for item in self.media)
        return len(self.text.encode()) + 4 * len(self.token_ids) + files + sum(int(array.nbytes) for array in arrays)


Adapter = Callable[[EngineInput, Sequence[StageInput], Stage], EngineInput | None]
"""(the request's prompt, outputs of the stages before in the order of `inputs`, this stage) -> the engine's input.

None says that there is nothing to do: right where the stages before made nothing, an error elsewhere. It may be a
class: it is then made once a task, without arguments, and called with each chunk, so that it may remember. On an edge
of mode stream such a class may also return None to wait for more, and is called with the last chunk (`finished`) even
when that is empty.
"""

"""What it cost to bring the outputs of the stages before: bytes and time by stage, chunks of streams too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh_worker.adapters import StageInput


@dataclass(slots=True)
class Transfer:
    """What was brought from one stage."""

    source: str
    size_bytes: int = 0
    duration_s: float = 0.0


class Transfers:
    """Those of one task."""

    __slots__ = ("_by_source",)

    def __init__(self) -> None:
        self._by_source: dict[str, Transfer] = {}

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._by_source.values())

    def add(self, brought: StageInput, duration_s: float) -> Transfer:
        """An output, or a chunk of one, is here."""
        transfer = self._by_source.setdefault(brought.stage, Transfer(brought.stage))
        transfer.size_bytes += brought.size_bytes
        transfer.duration_s += duration_s
        return transfer

    def tell(self, finished: frame_pb.StageFinished) -> None:
        """Put them into a task's last word."""
        for transfer in self:
            took = Duration()
            took.FromNanoseconds(int(transfer.duration_s * 1e9))
            finished.transfers.add(source=transfer.source, size_bytes=transfer.size_bytes, duration=took)

"""Edges of mode stream: chunks from a stage to its consumers, and the credit that keeps a fast one from flooding.

Credit is counted in output units (a token id, or one other piece). A producer starts with a window; it gets new units
as its slowest consumer takes chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_head.orchestration.task import Task, TaskState

WINDOW_UNITS = 64
"""Units that may be on their way between a producer and its slowest consumer."""
UNLIMITED = 1 << 30


class StreamEdge:
    """What one consumer has of one producer."""

    __slots__ = (
        "closed",
        "consumer",
        "deltas",
        "in_flight",
        "is_opened",
        "pieces",
        "producer",
        "read",
        "sent",
        "taken",
        "texts",
        "tokens",
    )

    def __init__(self, producer: Task, consumer: Task) -> None:
        self.producer = producer
        self.consumer = consumer
        self.taken = 0
        """Units of the producer that the consumer's engine took, all attempts."""
        self.reset()

    def reset(self) -> None:
        """The consumer starts anew, so that everything is to be sent again."""
        self.tokens = self.texts = self.pieces = self.deltas = 0
        self.closed = False
        self.is_opened = False
        """The consumer's engine began, with the chunk that came along with the submission."""
        self.in_flight: deque[tuple[int, int]] = deque()
        """Units of each chunk on its way, and how many pieces were sent with it and before."""
        self.read = self.sent = 0
        """Pieces that the consumer has brought to itself for sure, and those of all chunks it took: it says that it
        takes a chunk before it brings what that refers to."""

    def restart(self) -> None:
        """The producer starts anew too: nothing of it counts as taken."""
        self.reset()
        self.taken = 0

    def next_chunk(self) -> stage_pb.UpstreamOutput | None:
        """What the producer made since the last chunk, with `finished` once it is done; None when that is nothing."""
        output, is_done = self.producer.output, self.producer.state is TaskState.DONE
        token_ids = output.token_ids[self.tokens :]
        text = "".join(output.texts[self.texts :])
        pieces = output.pieces[self.pieces :]
        # Further completions are not fed, but their credit was used.
        unread = sum(1 for delta in output.deltas[self.deltas :] if delta.index)
        if self.closed or not (token_ids or text or pieces or unread or is_done):
            return None
        chunk = stage_pb.UpstreamOutput(stage=self.producer.name, text=text, token_ids=token_ids, finished=is_done)
        add_pieces(chunk, pieces)
        self.tokens += len(token_ids)
        self.texts = len(output.texts)
        self.pieces += len(pieces)
        self.deltas = len(output.deltas)
        self.closed = is_done
        self.in_flight.append((len(token_ids) + len(pieces) + unread, self.pieces))
        return chunk

    def take(self, chunks: int) -> None:
        """The consumer's engine took that many chunks."""
        for _ in range(min(chunks, len(self.in_flight))):
            self.read = self.sent
            units, self.sent = self.in_flight.popleft()
            self.taken += units

    @property
    def allowed(self) -> int:
        """Units the producer may have sent in all, as far as this consumer is concerned."""
        if self.consumer.state is TaskState.DONE:
            return UNLIMITED
        return self.taken + WINDOW_UNITS


class StreamEdges:
    """All edges of mode stream of one request."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self.into: dict[str, list[StreamEdge]] = {}
        """By consumer."""
        self.out_of: dict[str, list[StreamEdge]] = {}
        """By producer."""
        self._granted: dict[str, int] = {}
        for task in tasks.values():
            if task.planned.reads_stream:
                for name in task.planned.inputs:
                    edge = StreamEdge(tasks[name], task)
                    self.into.setdefault(task.name, []).append(edge)
                    self.out_of.setdefault(name, []).append(edge)

    def first_chunks(self, consumer: Task) -> list[stage_pb.UpstreamOutput]:
        """What a bound consumer can be submitted with; empty when there is nothing yet."""
        return [chunk for edge in self.into[consumer.name] if (chunk := edge.next_chunk()) is not None]

    def is_closed(self, consumer: Task) -> bool:
        """Whether a consumer was sent all its input."""
        return all(edge.closed for edge in self.into[consumer.name])

    def reset(self, consumer: Task) -> None:
        """A consumer's next attempt gets everything again."""
        for edge in self.into.get(consumer.name, ()):
            edge.reset()

    def restart(self, consumer: Task) -> None:
        """A consumer begins anew, since a producer did."""
        for edge in self.into.get(consumer.name, ()):
            edge.restart()

    def window(self, producer: Task) -> int:
        """Credit that a producer's new attempt starts with; 0, no limit, without a stream consumer."""
        edges = self.out_of.get(producer.name)
        if edges is None:
            return 0
        # A resumed producer does not send again what it sent: that is not counted twice.
        sent = len(producer.output.token_ids) + len(producer.output.pieces)
        self._granted[producer.name] = max(min(edge.allowed for edge in edges), sent + 1)
        return min(self._granted[producer.name] - sent, UNLIMITED)

    def open(self, consumer: Task) -> None:
        """A consumer's engine began: it has the first chunks."""
        for edge in self.into.get(consumer.name, ()):
            if not edge.is_opened:
                edge.is_opened = True
                edge.take(1)

    def take(self, consumer: Task, chunks: int) -> None:
        """A consumer's engine took chunks. It does not say of which producer: each edge's oldest go first."""
        for edge in self.into.get(consumer.name, ()):
            count = min(chunks, len(edge.in_flight))
            edge.take(count)
            chunks -= count

    def producers(self, consumer: Task) -> list[Task]:
        """The tasks that a consumer reads as streams."""
        return [edge.producer for edge in self.into.get(consumer.name, ())]

    def read_by_all(self, producer: Task) -> int:
        """How many of a producer's first pieces no consumer has still to bring to itself."""
        read = len(producer.output.pieces)
        for edge in self.out_of[producer.name]:
            if edge.consumer.state is not TaskState.DONE:
                # With several producers it is not known whose chunk was taken.
                read = min(read, edge.read if len(self.into[edge.consumer.name]) == 1 else 0)
        return read

    def new_credit(self, consumer: Task) -> Iterator[tuple[Task, int]]:
        """Running producers of a consumer, and the units they may send beyond what they were granted."""
        for edge in self.into.get(consumer.name, ()):
            producer = edge.producer
            if not producer.is_live or producer.is_aborting:
                continue
            allowed = min(other.allowed for other in self.out_of[producer.name])
            units = allowed - self._granted[producer.name]
            if units > 0:
                self._granted[producer.name] = allowed
                yield producer, units


def whole_output(producer: Task) -> stage_pb.UpstreamOutput:
    """Everything a finished stage made."""
    output = producer.output
    chunk = stage_pb.UpstreamOutput(
        stage=producer.stage_name,
        role=producer.companion.role if producer.companion else "",
        text=output.text,
        token_ids=output.token_ids,
        finished=producer.state is TaskState.DONE,
    )
    add_pieces(chunk, output.pieces)
    return chunk


def add_pieces(chunk: stage_pb.UpstreamOutput, pieces: Sequence[frame_pb.Frame]) -> None:
    """Add frames of media, sound and tensors to a chunk."""
    for frame in pieces:
        kind = frame.WhichOneof("content")
        if kind == "media":
            chunk.media.append(frame.media)
        elif kind == "audio_chunk":
            chunk.audio_chunks.append(frame.audio_chunk)
        elif kind == "tensor":
            chunk.tensors.append(frame.tensor)

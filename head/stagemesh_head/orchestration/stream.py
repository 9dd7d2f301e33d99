"""One client's stream: what is ready for it, in order, merged while it waits for its moment."""

from __future__ import annotations

import asyncio
from time import monotonic

from stagemesh.rpc.errors import MeshError
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh_head.orchestration.pacer import Pacer
from stagemesh_head.orchestration.task import TaskOutput


class TextCursor:
    """How much of a task's text a client was given."""

    __slots__ = ("is_dirty", "output", "replica_id", "stage", "texts", "tokens")

    def __init__(self, stage: str, output: TaskOutput) -> None:
        self.stage = stage
        self.replica_id = 0
        self.output = output
        self.is_dirty = False
        self.skip_to_end()

    def skip_to_end(self) -> None:
        """What there is now counts as given."""
        self.tokens, self.texts = len(self.output.token_ids), len(self.output.texts)

    def cut(self, frame: frame_pb.Frame) -> None:
        """Put what is new into `frame`."""
        self.is_dirty = False
        output = self.output
        frame.stage = self.stage
        frame.replica_id = self.replica_id
        delta = frame.text
        delta.text = "".join(output.texts[self.texts :])
        delta.token_ids.extend(output.token_ids[self.tokens :])
        self.skip_to_end()


class ClientStream:
    """Filled synchronously by a request's tasks, emptied by the handler of its call."""

    __slots__ = (
        "_dirty",
        "_end",
        "_error",
        "_frames",
        "_is_scheduled",
        "_pacer",
        "_waiter",
        "due",
        "is_ended",
        "last_window",
        "pending_bytes",
        "request_id",
        "sequence",
    )

    def __init__(self, request_id: str, pacer: Pacer, *, sequence: int = 0) -> None:
        """Args: sequence: of the last response that the client has already."""
        self.request_id = request_id
        self.sequence = sequence
        self.due = 0.0
        self.last_window = -1
        self.is_ended = False
        self.pending_bytes = 0
        """Bytes of files, previews, sound and tensors that the client has not read."""
        self._pacer = pacer
        self._frames: list[frame_pb.Frame] = []
        self._dirty: list[TextCursor] = []
        self._end: inference_pb.RequestFinished | None = None
        self._error: MeshError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_scheduled = False

    # -- filling ----------------------------------------------------------------
    def text_arrived(self, cursor: TextCursor) -> None:
        """A task's text grew: the hot path."""
        if not cursor.is_dirty:
            cursor.is_dirty = True
            self._dirty.append(cursor)
            # While the handler writes nobody waits; it looks again when it is done.
            if self._waiter is not None and not self._is_scheduled and not self._schedule(monotonic()):
                self._wake()

    def add(self, frame: frame_pb.Frame, size: int = 0) -> None:
        """A frame that shall not wait. Text of other stages that came before may be sent after it."""
        self._frames.append(frame)
        self.pending_bytes += size
        self._wake()

    def close_text(self, cursor: TextCursor) -> None:
        """Turn a task's waiting text into a frame, so that what is added next comes after it."""
        if cursor.is_dirty:
            self._dirty.remove(cursor)
            frame = frame_pb.Frame()
            cursor.cut(frame)
            self._frames.append(frame)

    def drop_text(self, cursor: TextCursor) -> None:
        """Forget a task's waiting text, since it starts anew."""
        if cursor.is_dirty:
            self._dirty.remove(cursor)
            cursor.is_dirty = False

    def end(self, finished: inference_pb.RequestFinished | None, error: MeshError | None) -> None:
        """Nothing follows. With neither there is nobody to tell."""
        self.is_ended = True
        self._end, self._error = finished, error
        self._wake()

    @property
    def outcome(self) -> str:
        """How it ended, in one word for statistics: a finish reason, an error's reason, or `left`."""
        if self._end is not None:
            word = frame_pb.FinishReason.Name(self._end.finish_reason).removeprefix("FINISH_REASON_")
            return word.lower()
        return self._error.reason.value.lower() if self._error is not None else "left"

    # -- emptying ---------------------------------------------------------------
    async def next(self) -> list[inference_pb.GenerateResponse]:
        """The next responses; empty at the end.

        Raises:
            MeshError: the request failed, and all that came before was returned.
        """
        while not (self._frames or self.is_ended):
            if self._dirty and not self._is_scheduled and not self._schedule(monotonic()):
                break
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if self._dirty and not self._is_scheduled:
                break
        responses = self._cut()
        if not responses and self._error is not None:
            error, self._error = self._error, None
            raise error
        return responses

    def flush_now(self) -> None:
        """The pacer says that the moment has come."""
        self._is_scheduled = False
        self._wake()

    def _schedule(self, now: float) -> bool:
        """Have `flush_now` called at the right moment; False when that is now."""
        self._is_scheduled = self._pacer.wait(self, now)
        return self._is_scheduled

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _cut(self) -> list[inference_pb.GenerateResponse]:
        self._pacer.flushed(self, monotonic())
        responses = []
        for frame in self._frames:
            response = self._response()
            response.frame.CopyFrom(frame)
            responses.append(response)
        self._frames.clear()
        self.pending_bytes = 0
        for cursor in self._dirty:
            response = self._response()
            cursor.cut(response.frame)
            responses.append(response)
        self._dirty.clear()
        if self._end is not None:
            response = self._response()
            response.finished.CopyFrom(self._end)
            responses.append(response)
            self._end = None
        return responses

    def _response(self) -> inference_pb.GenerateResponse:
        self.sequence += 1
        return inference_pb.GenerateResponse(request_id=self.request_id, sequence=self.sequence)

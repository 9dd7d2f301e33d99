"""Where an engine puts what it makes of one task: counted against the consumer's credit, then into the outbox."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stagemesh.rpc.errors import MeshError
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.wire import duration
from stagemesh_worker.replica.keeper import MEDIA_INLINE_BYTES, Keeper
from stagemesh_worker.replica.outbox import Outbox
from stagemesh_worker.replica.transfers import Transfers

COPY_ON_LOOP_BELOW_BYTES = 1 << 20
"""A larger array is copied on a thread: it would hold the event loop for over a millisecond."""


class _Tokens(NamedTuple):
    ids: list[int]
    text: str


class _Event(NamedTuple):
    event: stage_pb.TaskEvent
    size_bytes: int
    is_end: bool = False


class SlotSink:
    """The `TaskSink` of one slot.

    Output beyond the credit is held here, in order, until more is granted; `ready` tells the engine to wait meanwhile.
    """

    __slots__ = (
        "_credit",
        "_first_output",
        "_granted",
        "_held",
        "_keeper",
        "_on_end",
        "_on_error",
        "_outbox",
        "_request_id",
        "_started_at",
        "_submitted_at",
        "completion_tokens",
        "ended",
        "ended_at",
        "engine_queue_s",
        "finished",
        "slot",
        "transfer_s",
        "transfers",
    )  # fmt: skip

    def __init__(
        self,
        submit: stage_pb.SubmitTask,
        outbox: Outbox,
        keeper: Keeper,
        on_end: Callable[[], None],
        on_error: Callable[[MeshError], None],
    ) -> None:
        """A sink for one visit.

        Args:
            on_end: called when the terminal event went to the outbox: the slot is free again.
            on_error: called when output that was taken could not be kept.
        """
        self.slot = submit.slot
        self._request_id = submit.request_id
        self._outbox = outbox
        self._keeper = keeper
        self._credit: int | None = submit.credit or None
        self._held: deque[_Tokens | _Event | asyncio.Future[_Event]] = deque()
        self._granted = asyncio.Event()
        self._submitted_at = time.monotonic()
        self._started_at = 0.0
        self._first_output = 0.0
        self.engine_queue_s = 0.0
        self.transfer_s = 0.0
        """Until the inputs that came with the task were there."""
        self.transfers = Transfers()
        self.completion_tokens = 0
        self.finished = False
        """The engine said the end; nothing more is taken from it."""
        self.ended = False
        """The terminal event is on its way."""
        self.ended_at = 0.0
        """Since then, on the monotonic clock."""
        self._on_end = on_end
        self._on_error = on_error

    @property
    def first_output_at(self) -> float:
        """Moment of the first output, on the monotonic clock; 0 when there was none."""
        return self._first_output

    @property
    def writable(self) -> bool:
        """Whether `ready` would return at once."""
        return self._outbox.has_room and not self._held and (self._credit is None or self._credit > 0)

    async def ready(self) -> None:
        """Wait until the consumer has credit for another frame and the link keeps up."""
        while not self.writable and not self._outbox.closed:
            if self._outbox.has_room:
                self._granted.clear()
                await self._granted.wait()
            else:
                await self._outbox.wait_for_room()

    def started(self, engine_queue_s: float = 0.0) -> None:
        """The engine began; only the first call counts."""
        if self._started_at:
            return
        self._started_at = time.monotonic()
        self.engine_queue_s = engine_queue_s
        event = stage_pb.TaskEvent(slot=self.slot)
        event.started.engine_queue.CopyFrom(duration(engine_queue_s))
        event.started.transfer.CopyFrom(duration(self.transfer_s))
        self._outbox.add_event(event)

    def tokens(self, token_ids: Sequence[int], text: str) -> None:
        """New token ids and their text."""
        if self.finished:
            return
        ids = list(token_ids)
        if not self._first_output:
            self._first_output = time.monotonic()
        self.completion_tokens += len(ids)
        if self._credit is None and not self._held:
            self._outbox.add_tokens(self.slot, ids, text)
        else:
            self._held.append(_Tokens(ids, text))
            self._release()

    def text(self, delta: frame_pb.TextDelta) -> None:
        """New text of any completion, with log-probabilities."""
        self.completion_tokens += len(delta.token_ids)
        self._piece(stage_pb.TaskEvent(slot=self.slot, text=delta), 0)

    def progress(self, progress: frame_pb.Progress) -> None:
        """A step was made; costs no credit. A preview that is too large for a message is left out."""
        if self.finished:
            return
        if len(progress.preview.data) >= MEDIA_INLINE_BYTES:
            progress.ClearField("preview")  # kept here it would outlive its use: nobody fetches it, nobody releases it
        self._outbox.add_event(stage_pb.TaskEvent(slot=self.slot, progress=progress), len(progress.preview.data))

    def media(self, media: frame_pb.MediaOutput) -> None:
        """A file is complete."""
        kept = self._keeper.media(self._request_id, media)
        self._piece(stage_pb.TaskEvent(slot=self.slot, media=kept), len(kept.data))

    def audio(self, chunk: frame_pb.AudioChunk) -> None:
        """A piece of sound."""
        size = len(chunk.samples.inline.data)
        self._piece(stage_pb.TaskEvent(slot=self.slot, audio_chunk=chunk), size)

    def tensor(self, name: str, array: Any) -> None:
        """A named NumPy array, inline or by reference; the engine must not change it afterwards."""
        if self.finished:
            return
        if array.nbytes < COPY_ON_LOOP_BELOW_BYTES:
            event = self._keep(name, array)
            self._piece(event.event, event.size_bytes)
            return
        copying = asyncio.get_running_loop().run_in_executor(None, self._keep, name, array)
        copying.add_done_callback(self._copied)
        self._held.append(copying)

    def _keep(self, name: str, array: Any) -> _Event:
        value = self._keeper.tensor(self._request_id, array)
        event = stage_pb.TaskEvent(slot=self.slot, tensor=frame_pb.TensorOutput(name=name, value=value))
        return _Event(event, len(value.inline.data))

    def _copied(self, copying: asyncio.Future[_Event]) -> None:
        error = None if copying.cancelled() else copying.exception()
        if error is not None and not self.ended:
            self._on_error(MeshError.from_exception(error))
        elif error is None and (self.ended or self._outbox.closed):
            self._keeper.drop([copying.result().event])
        elif error is None:
            self._release()
            self._granted.set()

    def finish(self, finished: frame_pb.StageFinished) -> None:
        """The task ended well. Timings that the engine did not fill in are filled in here."""
        if self.finished:
            return
        self.finished = True
        now, timings = time.monotonic(), finished.timings
        if not timings.HasField("engine_queue"):
            timings.engine_queue.CopyFrom(duration(self.engine_queue_s))
        if not timings.HasField("first_output"):
            timings.first_output.CopyFrom(duration((self._first_output or now) - self._submitted_at))
        if not timings.HasField("transfer"):
            timings.transfer.CopyFrom(duration(self.transfer_s))
        timings.total.CopyFrom(duration(now - self._submitted_at))
        self.transfers.tell(finished)
        self._end(stage_pb.TaskEvent(slot=self.slot, finished=finished))

    def failed(self, error: MeshError) -> None:
        """The task failed. What is held for lack of credit is dropped: a failure must not wait for a slow consumer."""
        self.finished = True
        self._drop_held()
        self._end(stage_pb.TaskEvent(slot=self.slot, failed=error.to_status()))

    def aborted(self) -> None:
        """The engine let go of an aborted task; what was held is of no use any more."""
        self.finished = True
        self._drop_held()
        event = stage_pb.TaskEvent(slot=self.slot)
        event.aborted.usage.completion_tokens = self.completion_tokens
        self._end(event)

    def input_taken(self, chunks: int = 1) -> None:
        """The engine took chunks of further input; costs no credit."""
        self._outbox.add_event(stage_pb.TaskEvent(slot=self.slot, input_taken=stage_pb.InputTaken(chunks=chunks)))

    def grant(self, units: int) -> None:
        """The consumer may get `units` more."""
        if self._credit is not None:
            self._credit += units
            self._release()
            self._granted.set()

    async def drained(self) -> None:
        """Wait until nothing is held for lack of credit."""
        while self._held and not self._outbox.closed:
            self._granted.clear()
            await self._granted.wait()

    def closed(self) -> None:
        """The link is gone: nobody may wait for credit any more."""
        self._drop_held()
        self._granted.set()

    def _drop_held(self) -> None:
        """Forget what nobody was told of; a tensor that is still copied follows when it is."""
        done = [item.result() if isinstance(item, asyncio.Future) else item for item in self._held if _is_done(item)]
        self._keeper.drop([item.event for item in done if isinstance(item, _Event)])
        self._held.clear()

    def _piece(self, event: stage_pb.TaskEvent, size_bytes: int) -> None:
        if self.finished:
            return
        if not self._first_output:
            self._first_output = time.monotonic()
        if self._credit is None and not self._held:
            self._outbox.add_event(event, size_bytes)
        else:
            self._held.append(_Event(event, size_bytes))
            self._release()

    def _end(self, event: stage_pb.TaskEvent) -> None:
        if self._held:
            self._held.append(_Event(event, 0, is_end=True))
        else:
            self._say_end(event)

    def _say_end(self, event: stage_pb.TaskEvent) -> None:
        self.ended, self.ended_at = True, time.monotonic()
        self._outbox.add_event(event)
        self._on_end()

    def _release(self) -> None:
        """Move what the credit pays for from here to the outbox, in order, up to a tensor that is still copied."""
        while self._held:
            first = self._held[0]
            if isinstance(first, asyncio.Future):
                if not first.done():
                    return
                self._held[0] = first = first.result()
            if isinstance(first, _Tokens):
                if not self._release_tokens(first):
                    return
            elif first.is_end:
                self._say_end(first.event)
            elif not self._pay(1):
                return
            else:
                self._outbox.add_event(first.event, first.size_bytes)
            self._held.popleft()

    def _release_tokens(self, tokens: _Tokens) -> bool:
        """Whether all of them are on their way."""
        ids, text = tokens
        if self._pay(len(ids)):
            self._outbox.add_tokens(self.slot, ids, text)
            return True
        paid = self._credit or 0
        if paid > 0:
            # Text cannot be cut at tokens, so it goes with the last of them.
            self._outbox.add_tokens(self.slot, ids[:paid], "")
            self._held[0] = _Tokens(ids[paid:], text)
            self._credit = 0
        return False

    def _pay(self, units: int) -> bool:
        if self._credit is None:
            return True
        if self._credit < units:
            return False
        self._credit -= units
        return True


def _is_done(item: _Tokens | _Event | asyncio.Future[_Event]) -> bool:
    """Whether it is at hand: not still copied, and no copy that failed."""
    return not isinstance(item, asyncio.Future) or (item.done() and not item.cancelled() and item.exception() is None)

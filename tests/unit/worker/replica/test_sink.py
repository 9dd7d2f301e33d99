"""A task's output on its way to the link: order, credit, bounds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh_worker.replica import outbox
from stagemesh_worker.replica.keeper import MEDIA_INLINE_BYTES
from stagemesh_worker.replica.outbox import HIGH_WATER_UNITS, MESSAGE_BYTES, Outbox
from stagemesh_worker.replica.sink import SlotSink


class Box:
    """An outbox with sinks, and all that came out of it."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.ended: list[int] = []
        self.errors: asyncio.Queue[MeshError] = asyncio.Queue()
        self.copying = threading.Event()
        self.copying.set()
        self.dropped: list[str] = []
        """Keys of tensors that were kept and are of no use any more."""
        self.messages: list[stage_pb.ExecuteResponse] = []

    def sink(self, slot: int = 1, credit: int = 0) -> SlotSink:
        submit = stage_pb.SubmitTask(slot=slot, request_id="r", credit=credit)
        return SlotSink(
            submit,
            self.outbox,
            self,
            on_end=lambda: self.ended.append(slot),
            on_error=self.errors.put_nowait,
        )

    # What a Keeper does, in the hands of a test.
    def tensor(self, request_id: str, array: Any) -> tensor_pb.TensorValue:
        self.copying.wait(5)
        if array.size > 1 << 20:
            raise MeshError(Reason.OVERLOADED, "no room")
        return tensor_pb.TensorValue(ref=tensor_pb.TensorRef(key=str(array.size)))

    def media(self, request_id: str, media: frame_pb.MediaOutput) -> frame_pb.MediaOutput:
        return media

    def drop(self, events: Iterable[stage_pb.TaskEvent]) -> None:
        self.dropped += [event.tensor.value.ref.key for event in events if event.HasField("tensor")]

    async def drain(self) -> list[tuple[int, object]]:
        """What came out now, in order: (slot, token ids) for columns, (slot, event name) for events."""
        out: list[tuple[int, object]] = []
        while self.outbox._wake.is_set():
            message = await self.outbox.take()
            assert message is not None
            self.messages.append(message)
            at, columns = 0, message.columns
            for slot, count in zip(columns.slots, columns.counts, strict=True):
                out.append((slot, list(columns.token_ids[at : at + count])))
                at += count
            out += [(event.slot, event.WhichOneof("event")) for event in message.events]
        return out


@pytest.fixture
async def box() -> Box:
    return Box()


async def test_tokens_of_one_task_between_two_writes_travel_as_one_entry(box: Box) -> None:
    first, second = box.sink(1), box.sink(2)
    first.tokens((5,), "five ")
    second.tokens((9,), "nine ")
    first.tokens((6, 7), "six seven ")
    assert await box.drain() == [(1, [5, 6, 7]), (2, [9])]
    assert list(box.messages[0].columns.texts) == ["five six seven ", "nine "]


async def test_last_tokens_come_before_the_end_in_the_same_message(box: Box) -> None:
    sink = box.sink()
    sink.tokens((5,), "five ")
    sink.finish(frame_pb.StageFinished())
    assert await box.drain() == [(1, [5]), (1, "finished")]
    assert len(box.messages) == 1 and box.ended == [1]


async def test_messages_of_a_busy_engine_merge_but_a_first_token_does_not_wait_for_its_start(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", pause)
    monkeypatch.setattr(outbox, "monotonic", lambda: 100.0)
    sink = box.sink()
    sink.started()
    assert await box.drain() == [(1, "started")]
    sink.tokens((1,), "one ")
    assert await box.drain() == [(1, [1])]
    assert pauses == []
    sink.tokens((2,), "two ")
    assert await box.drain() == [(1, [2])]
    assert pauses == [pytest.approx(outbox.MERGE_S)]


async def test_nothing_follows_the_end(box: Box) -> None:
    sink = box.sink()
    sink.finish(frame_pb.StageFinished())
    sink.tokens((5,), "late")
    sink.progress(frame_pb.Progress(step=1))
    sink.media(frame_pb.MediaOutput())
    sink.finish(frame_pb.StageFinished())
    assert await box.drain() == [(1, "finished")]


async def test_tokens_beyond_the_credit_wait_and_text_goes_with_the_last(box: Box) -> None:
    sink = box.sink(credit=2)
    sink.tokens((1, 2, 3), "one two three ")
    sink.finish(frame_pb.StageFinished())
    assert not sink.writable
    assert await box.drain() == [(1, [1, 2])]
    sink.grant(1)
    assert await box.drain() == [(1, [3]), (1, "finished")]
    assert [list(message.columns.texts) for message in box.messages] == [[""], ["one two three "]]


async def test_preview_too_large_for_a_message_is_left_out(box: Box) -> None:
    sink = box.sink()
    for size in (MEDIA_INLINE_BYTES - 1, MEDIA_INLINE_BYTES):
        sink.progress(frame_pb.Progress(step=1, preview=frame_pb.MediaOutput(data=bytes(size))))
    await box.drain()
    previews = [event.progress.HasField("preview") for message in box.messages for event in message.events]
    assert previews == [True, False]


async def test_progress_costs_no_credit(box: Box) -> None:
    sink = box.sink(credit=1)
    sink.tokens((1,), "one ")
    sink.progress(frame_pb.Progress(step=1))
    assert await box.drain() == [(1, [1]), (1, "progress")]
    sink.media(frame_pb.MediaOutput(data=b"x"))
    assert await box.drain() == []
    sink.grant(1)
    assert await box.drain() == [(1, "media")]


async def test_abort_does_not_wait_for_credit_and_drops_what_is_held(box: Box) -> None:
    sink = box.sink(credit=1)
    sink.tokens((1, 2), "one two ")
    sink.aborted()
    assert await box.drain() == [(1, [1]), (1, "aborted")]
    assert box.messages[-1].events[-1].aborted.usage.completion_tokens == 2


async def test_failure_does_not_wait_for_credit(box: Box) -> None:
    sink = box.sink(credit=1)
    sink.tokens((1, 2), "one two ")
    sink.failed(MeshError(Reason.ENGINE_DEAD))
    assert await box.drain() == [(1, [1]), (1, "failed")]


async def test_ready_waits_for_the_grant(box: Box) -> None:
    sink = box.sink(credit=1)
    await asyncio.wait_for(sink.ready(), 1)
    sink.tokens((1,), "one ")
    waiting = asyncio.create_task(sink.ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    sink.grant(1)
    await asyncio.wait_for(waiting, 1)


async def test_ready_waits_while_the_link_does_not_keep_up(box: Box) -> None:
    sink = box.sink()
    sink.tokens([1] * HIGH_WATER_UNITS, "")
    waiting = asyncio.create_task(sink.ready())
    await asyncio.sleep(0)
    assert not waiting.done() and not sink.writable
    await box.drain()
    await asyncio.wait_for(waiting, 1)


async def test_a_closed_link_lets_nobody_wait(box: Box) -> None:
    full, poor = box.sink(1), box.sink(2, credit=1)
    full.tokens([1] * HIGH_WATER_UNITS, "")
    poor.tokens((1, 2), "")
    waiting = [asyncio.create_task(sink.ready()) for sink in (full, poor)]
    waiting.append(asyncio.create_task(poor.drained()))
    await asyncio.sleep(0)
    box.outbox.close()
    poor.closed()
    await asyncio.wait_for(asyncio.gather(*waiting), 1)
    assert await box.outbox.take() is None


async def test_large_events_are_spread_over_messages_in_order(box: Box) -> None:
    sink = box.sink()
    for number in range(4):
        sink.media(frame_pb.MediaOutput(data=bytes(MESSAGE_BYTES // 2 - 1), index=number))
    await box.drain()
    indexes = [event.media.index for message in box.messages for event in message.events]
    assert indexes == [0, 1, 2, 3] and len(box.messages) == 2


async def test_large_tensor_is_copied_off_the_loop_and_keeps_its_place(box: Box) -> None:
    sink = box.sink()
    box.copying.clear()
    sink.tokens((1,), "one ")
    sink.tensor("large", np.zeros(1 << 20, dtype=np.uint8))
    sink.tokens((2,), "two ")
    sink.finish(frame_pb.StageFinished())
    assert await box.drain() == [(1, [1])]
    assert not sink.writable
    box.copying.set()
    await asyncio.wait_for(sink.drained(), 5)
    assert await box.drain() == [(1, [2]), (1, "tensor"), (1, "finished")]
    assert box.messages[-1].events[0].tensor.value.ref.key == str(1 << 20)


async def test_tensor_that_cannot_be_kept_is_an_error_of_its_task(box: Box) -> None:
    sink = box.sink()
    sink.tensor("too large", np.zeros((1 << 20) + 1, dtype=np.uint8))
    error = await asyncio.wait_for(box.errors.get(), 5)
    assert error.reason == Reason.OVERLOADED
    sink.failed(error)
    assert await box.drain() == [(1, "failed")]


@pytest.mark.parametrize("end", ["aborted", "failed", "closed"])
async def test_tensors_that_nobody_was_told_of_are_dropped(box: Box, end: str) -> None:
    sink = box.sink(credit=1)
    sink.tensor("told", np.zeros(1, dtype=np.uint8))
    sink.tensor("held", np.zeros(2, dtype=np.uint8))
    box.copying.clear()
    sink.tensor("copied", np.zeros(1 << 20, dtype=np.uint8))
    if end == "failed":
        sink.failed(MeshError(Reason.STAGE_FAILED, "it broke"))
    elif end == "aborted":
        sink.aborted()
    else:
        box.outbox.close()
        sink.closed()
    assert box.dropped == ["2"]
    box.copying.set()
    async with asyncio.timeout(5):
        while box.dropped != ["2", str(1 << 20)]:  # noqa: ASYNC110  a thread is to finish, and a callback to run
            await asyncio.sleep(0.002)


async def test_timings_are_filled_in_at_the_end(box: Box) -> None:
    sink = box.sink()
    sink.started(0.5)
    sink.tokens((1,), "one ")
    sink.finish(frame_pb.StageFinished())
    await box.drain()
    timings = box.messages[-1].events[-1].finished.timings
    assert timings.engine_queue.ToMilliseconds() == 500
    assert 0 < timings.first_output.ToNanoseconds() <= timings.total.ToNanoseconds()


@given(
    st.lists(st.one_of(st.integers(1, 4), st.just("grant"), st.just("media"), st.just("drain")), max_size=40),
    st.integers(1, 6),
)
async def test_credit_is_never_exceeded_and_nothing_is_lost_or_reordered(steps: list[int | str], credit: int) -> None:
    box = Box()
    sink = box.sink(credit=credit)
    allowed, made, got = credit, [], []
    token = 0
    for step in steps:
        if step == "grant":
            sink.grant(2)
            allowed += 2
        elif step == "media":
            sink.media(frame_pb.MediaOutput())
            made.append("media")
        elif step == "drain":
            got += await box.drain()
        else:
            ids = list(range(token, token + step))
            token += step
            sink.tokens(ids, "".join(f"{one} " for one in ids))
            made += ids
        units = sum(len(what) if isinstance(what, list) else 1 for _, what in got)
        assert units <= allowed
    sink.finish(frame_pb.StageFinished())
    sink.grant(1000)
    got += await box.drain()
    tokens = [one for _, what in got if isinstance(what, list) for one in what]
    assert tokens == [one for one in made if one != "media"]
    assert sum(what == "media" for _, what in got) == made.count("media")
    assert got[-1] == (1, "finished") and box.ended == [1]
    text = "".join(text for message in box.messages for text in message.columns.texts)
    assert text == "".join(f"{one} " for one in range(token))

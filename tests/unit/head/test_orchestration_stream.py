"""A client's stream: order, merging, and when it is flushed."""

from __future__ import annotations

import asyncio
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_head.orchestration import events as ev
from stagemesh_head.orchestration.pacer import MAX_INTERVAL_S, MIN_INTERVAL_S, WINDOW_S, Pacer
from stagemesh_head.orchestration.receiver import MAX_PREVIEW_BYTES, TaskReceiver
from stagemesh_head.orchestration.stream import ClientStream, TextCursor
from stagemesh_head.orchestration.task import TaskOutput
from stagemesh_head.registry.rows import ReplicaKey


class Paced:
    def __init__(self) -> None:
        self.due = 0.0
        self.last_window = -1
        self.flushed_at: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def flush_now(self) -> None:
        self.flushed_at.set_result(monotonic())


def busy_pacer(streams: int, now: float) -> Pacer:
    """A pacer that has just seen so many streams at once."""
    pacer = Pacer()
    for moment in (now - WINDOW_S, now):
        for _ in range(streams):
            pacer.flushed(Paced(), moment)
    return pacer


async def test_an_idle_head_never_waits() -> None:
    pacer, stream = busy_pacer(3, 100.0), Paced()
    pacer.flushed(stream, 100.0)
    assert not pacer.wait(stream, 100.0)


@pytest.mark.parametrize(("streams", "least", "most"), [(10, MIN_INTERVAL_S, 0.006), (500, 0.02, MAX_INTERVAL_S)])
async def test_the_interval_grows_with_the_busy_streams_within_bounds(streams: int, least: float, most: float) -> None:
    assert least <= busy_pacer(streams, 100.0).interval <= most


async def test_the_interval_falls_back_after_a_quiet_time() -> None:
    pacer = busy_pacer(500, 100.0)
    pacer.flushed(Paced(), 101.0)
    assert pacer.interval == 0.0


async def test_a_stream_under_load_waits_for_its_moment() -> None:
    now = monotonic()
    pacer, stream = busy_pacer(500, now), Paced()
    pacer.flushed(stream, now)
    assert pacer.wait(stream, now)
    async with asyncio.timeout(5):
        assert await stream.flushed_at >= now + MAX_INTERVAL_S - 0.001


async def test_a_stream_as_fast_as_the_interval_is_not_late_for_ever_after_one_late_token() -> None:
    pacer, stream = busy_pacer(500, 100.0), Paced()
    pacer.flushed(stream, 100.0)
    # A token every interval, the third one 8 ms late.
    for number, late in enumerate((0.0, 0.0, 0.008, 0.0, 0.0), 1):
        arrival = 100.0 + number * MAX_INTERVAL_S + late + 1e-6
        assert not pacer.wait(stream, arrival), number
        pacer.flushed(stream, arrival)
        pacer.interval = MAX_INTERVAL_S


def cursor_of(stage: str = "writer") -> TextCursor:
    return TextCursor(stage, TaskOutput())


def say(stream: ClientStream, cursor: TextCursor, token: int, text: str) -> None:
    cursor.output.token_ids.append(token)
    cursor.output.texts.append(text)
    stream.text_arrived(cursor)


async def test_text_that_gathers_becomes_one_message() -> None:
    stream, cursor = ClientStream("r", Pacer()), cursor_of()
    for token in range(3):
        say(stream, cursor, token, str(token))
    (response,) = await stream.next()
    assert (response.frame.text.text, list(response.frame.text.token_ids)) == ("012", [0, 1, 2])
    say(stream, cursor, 3, "3")
    (response,) = await stream.next()
    assert (response.sequence, response.frame.text.text) == (2, "3")


async def test_what_is_added_after_text_comes_after_it() -> None:
    stream, cursor = ClientStream("r", Pacer()), cursor_of()
    say(stream, cursor, 1, "a")
    stream.close_text(cursor)
    stream.add(frame_pb.Frame(stage="writer", progress=frame_pb.Progress(step=1)))
    say(stream, cursor, 2, "b")
    responses = await stream.next()
    assert [r.frame.WhichOneof("content") for r in responses] == ["text", "progress", "text"]


async def test_text_of_a_task_that_starts_anew_is_dropped() -> None:
    stream, cursor = ClientStream("r", Pacer()), cursor_of()
    say(stream, cursor, 1, "old")
    stream.drop_text(cursor)
    cursor.output.clear()
    cursor.skip_to_end()
    say(stream, cursor, 2, "new")
    (response,) = await stream.next()
    assert response.frame.text.text == "new"


async def test_the_error_comes_after_all_that_was_there() -> None:
    stream, cursor = ClientStream("r", Pacer()), cursor_of()
    say(stream, cursor, 1, "a")
    stream.end(None, MeshError(Reason.STAGE_FAILED))
    assert len(await stream.next()) == 1
    with pytest.raises(MeshError):
        await stream.next()
    assert await stream.next() == []


async def test_the_end_is_the_last_message_and_then_nothing_follows() -> None:
    stream = ClientStream("r", Pacer(), sequence=41)
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.end(inference_pb.RequestFinished(finish_reason=frame_pb.FINISH_REASON_COMPLETE), None)
    (response,) = await waiting
    assert response.sequence == 42
    assert response.HasField("finished")
    assert await stream.next() == []


async def test_previews_wait_within_their_own_bound_and_their_steps_are_told_all_the_same() -> None:
    stream, cursor = ClientStream("r", Pacer()), cursor_of("painter")
    link: Any = SimpleNamespace(key=ReplicaKey("demo", "painter", 0))
    events: list[ev.Event] = []
    task: Any = SimpleNamespace(name="painter", output=cursor.output, skip_media=0)
    receiver = TaskReceiver(task, link, events.append, stream=stream, cursor=cursor, feeds_stream=False)
    preview = frame_pb.MediaOutput(data=bytes(MAX_PREVIEW_BYTES // 4))
    for step in range(1, 9):
        progress = frame_pb.Progress(step=step, total_steps=8, preview=preview)
        receiver.on_event("progress", stage_pb.TaskEvent(progress=progress))
    assert stream.pending_bytes == MAX_PREVIEW_BYTES
    told = [response.frame.progress for response in await stream.next()]
    assert [progress.step for progress in told] == list(range(1, 9))
    assert [progress.HasField("preview") for progress in told] == [True] * 4 + [False] * 4
    assert (events, stream.pending_bytes) == ([], 0), "no slow reader fails for want of previews"

"""The way of a request through calls that break, driven without sockets and with a clock of the test."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh import Finished, RequestTimeout, TextDelta, Unreachable
from stagemesh.client.errors import Overloaded, Unavailable
from stagemesh.client.journey import Journey, RetryPolicy
from stagemesh.rpc.errors import Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def journey(clock: Clock, *, timeout_s: float = 60.0, policy: RetryPolicy | None = None) -> Journey:
    request = inference_pb.GenerateRequest(request_id="r")
    return Journey(request, timeout_s=timeout_s, policy=policy or RetryPolicy(), clock=clock, jitter=lambda: 0.5)


WORDS = [f"word{number} " for number in range(12)]


@given(st.lists(st.integers(0, len(WORDS)), max_size=8))
def test_text_is_whole_and_never_doubled_however_often_the_stream_breaks(breaks: list[int]) -> None:
    """The head of the test does what the contract says: it goes on after the tokens that the client names."""
    clock, got = Clock(), []
    travel = journey(clock)
    sequence = 0
    for stop_after in [*breaks, len(WORDS) + 1]:
        request, timeout = travel.next_call()
        assert timeout == pytest.approx(60 - (clock.now - 100))
        has = list(request.resume.stages[0].token_ids) if request.resume.stages else []
        assert "".join(got) == "".join(WORDS[: len(has)])
        if has:
            assert request.resume.stages[0].text == "".join(got)
            assert request.resume.sequence == sequence
        for number in range(len(has), len(WORDS)):
            if number - len(has) >= stop_after:
                break
            sequence += 1
            delta = frame_pb.TextDelta(text=WORDS[number], token_ids=[number])
            frame = travel.accept(
                inference_pb.GenerateResponse(
                    request_id="r", sequence=sequence, frame=frame_pb.Frame(stage="writer", text=delta)
                )
            )
            assert isinstance(frame, TextDelta)
            got.append(frame.text)
        else:
            end = travel.accept(
                inference_pb.GenerateResponse(
                    sequence=sequence + 1,
                    finished=inference_pb.RequestFinished(finish_reason=frame_pb.FINISH_REASON_COMPLETE),
                )
            )
            assert isinstance(end, Finished) and travel.is_finished
            break
        try:
            clock.now += travel.delay_after(Unreachable(Reason.UNREACHABLE))
        except Unreachable:
            assert not got and breaks.count(0) > 3  # three tries in vain are allowed, not more
            return
    assert "".join(got) == "".join(WORDS)


def test_what_had_come_of_a_stage_does_not_come_twice() -> None:
    travel = journey(Clock())
    picture = frame_pb.MediaOutput(modality=frame_pb.MODALITY_IMAGE, index=0, data=b"first")
    response = inference_pb.GenerateResponse(sequence=1, frame=frame_pb.Frame(stage="painter", media=picture))
    assert travel.accept(response) is not None
    travel.delay_after(Unreachable(Reason.UNREACHABLE))
    response.sequence = 2
    assert travel.accept(response) is None
    response.frame.media.index = 1
    assert travel.accept(response) is not None


def test_no_try_begins_after_the_deadline() -> None:
    clock = Clock()
    travel = journey(clock, timeout_s=5)
    with pytest.raises(Overloaded):  # the delay would end after the deadline: say now what is wrong
        travel.delay_after(Overloaded(Reason.OVERLOADED, retry_delay_s=6))
    clock.now += 5
    with pytest.raises(RequestTimeout, match="within 5 s"):
        travel.next_call()


def test_a_head_that_came_back_without_its_replicas_is_waited_for() -> None:
    travel = journey(Clock())
    delta = frame_pb.TextDelta(text="a", token_ids=[1])
    travel.accept(inference_pb.GenerateResponse(sequence=1, frame=frame_pb.Frame(stage="writer", text=delta)))
    with pytest.raises(Unavailable):  # not cut: the head itself gave up after its own tries
        travel.delay_after(Unavailable(Reason.NO_LIVE_REPLICA))
    assert travel.delay_after(Unreachable(Reason.UNREACHABLE)) > 0
    assert travel.delay_after(Unavailable(Reason.NO_LIVE_REPLICA)) > 0


def test_resuming_can_be_switched_off() -> None:
    travel = journey(Clock(), policy=RetryPolicy(resume_window_s=0))
    delta = frame_pb.TextDelta(text="a", token_ids=[1])
    travel.accept(inference_pb.GenerateResponse(sequence=1, frame=frame_pb.Frame(stage="writer", text=delta)))
    with pytest.raises(Unreachable):
        travel.delay_after(Unreachable(Reason.UNREACHABLE))

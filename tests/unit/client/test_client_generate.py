"""What `generate()` of both clients does, over real sockets against a scripted head."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from stagemesh import (
    Client,
    Diffusion,
    Finished,
    Frame,
    Image,
    InternalError,
    InvalidRequest,
    Llm,
    MeshError,
    NotFound,
    Overloaded,
    Progress,
    Reason,
    RequestTimeout,
    StageFinished,
    StageLost,
    TextDelta,
    Unreachable,
)
from stagemesh.v1 import frame_pb2 as frame_pb
from tests.unit.client.scripted_head import ScriptedHead, fail, failing, framed, free_port, text, the_end, whole_answer

Head = Callable[..., ScriptedHead]
Generate = Callable[..., list[Frame]]


def joined(frames: list[Frame]) -> str:
    return "".join(frame.text for frame in frames if isinstance(frame, TextDelta))


def test_every_kind_of_frame_arrives_typed_and_tagged(head: Head, generate: Generate) -> None:
    def script(request, context):  # type: ignore[no-untyped-def]
        yield text(request, 1, "a red circle", 11)
        step = frame_pb.Progress(step=1, total_steps=2)
        yield framed(request, 2, frame_pb.Frame(stage="painter", replica_id=3, progress=step))
        picture = frame_pb.MediaOutput(
            modality=frame_pb.MODALITY_IMAGE, mime_type="image/png", data=b"png", width=4, height=5, seed=7
        )
        yield framed(request, 3, frame_pb.Frame(stage="painter", replica_id=3, media=picture))
        finished = frame_pb.StageFinished(finish_reason=frame_pb.FINISH_REASON_COMPLETE, recovery="exact")
        finished.timings.queue.FromMilliseconds(20)
        finished.usage.diffusion_steps = 2
        finished.replicas.add(stage="painter", replica_id=1)
        finished.replicas.add(stage="painter", replica_id=3)
        finished.extra.update({"note": "x"})
        yield framed(request, 4, frame_pb.Frame(stage="painter", replica_id=3, stage_finished=finished))
        yield the_end(request, 5)

    frames = generate(head(script).address, request_id="mine")
    assert [type(frame) for frame in frames] == [TextDelta, Progress, Image, StageFinished, Finished]
    assert [frame.sequence for frame in frames] == [1, 2, 3, 4, 5]
    assert {frame.request_id for frame in frames} == {"mine"}
    assert [(frame.stage, frame.replica_id) for frame in frames] == [("writer", 1), *[("painter", 3)] * 3, ("", 0)]
    delta, progress, image, stage, end = frames
    assert isinstance(delta, TextDelta) and delta.token_ids == (11,)
    assert isinstance(progress, Progress) and (progress.step, progress.total_steps) == (1, 2)
    assert isinstance(image, Image) and (image.width, image.height, image.seed, image.data) == (4, 5, 7, b"png")
    assert isinstance(stage, StageFinished) and stage.replicas == (1, 3) and stage.recovery == "exact"
    assert stage.timings.queue_s == 0.02 and stage.usage.diffusion_steps == 2 and stage.extra == {"note": "x"}
    assert isinstance(end, Finished) and end.total_s == 1.5 and end.finish_reason == "complete"


def test_leaving_early_cancels_the_call(head: Head, generate: Generate) -> None:
    done = threading.Event()

    def script(request, context):  # type: ignore[no-untyped-def]
        yield text(request, 1, "a", 1)
        done.wait(20)
        yield the_end(request, 2)

    scripted = head(script)
    try:
        assert len(generate(scripted.address, take=1)) == 1
        assert scripted.cancelled.wait(5), "the head was not told that the client left"
    finally:
        done.set()


def test_an_overload_is_retried_after_the_delay_it_asked_for_with_the_same_request_id(
    head: Head, generate: Generate
) -> None:
    overloaded = failing(MeshError(Reason.OVERLOADED, retry_delay_s=0.3))
    scripted = head(overloaded, whole_answer)
    begin = time.monotonic()
    assert joined(generate(scripted.address)) == "a red circle"
    assert time.monotonic() - begin >= 0.3
    first, second = scripted.requests
    assert first.request_id == second.request_id != ""
    assert not second.HasField("resume")


@pytest.mark.parametrize(("max_retries", "calls"), [(0, 1), (2, 3)])
def test_retries_are_bounded(head: Head, generate: Generate, max_retries: int, calls: int) -> None:
    scripted = head(failing(MeshError(Reason.OVERLOADED, "64 requests wait", retry_delay_s=0.05)))
    with pytest.raises(Overloaded, match="64 requests wait") as caught:
        generate(scripted.address, client={"max_retries": max_retries})
    assert caught.value.retry_after_s == 0.05
    assert len(scripted.requests) == calls


@pytest.mark.parametrize(("max_retries", "calls"), [(0, 1), (3, 3)])
def test_a_question_for_the_pipeline_is_retried_as_the_request_is(
    head: Head, generate: Generate, max_retries: int, calls: int
) -> None:
    scripted = head(whole_answer)
    busy = MeshError(Reason.OVERLOADED, "not now", retry_delay_s=0.05)
    scripted.pipeline_errors = [busy, busy]
    arguments: dict[str, Any] = {"client": {"max_retries": max_retries}, "sampling": {"painter": {"seed": 7}}}
    if max_retries:
        assert joined(generate(scripted.address, **arguments)) == "a red circle"
        assert scripted.requests[0].sampling[0].params.diffusion.seed == 7
    else:
        with pytest.raises(Overloaded, match="not now"):
            generate(scripted.address, **arguments)
    assert scripted.asked_pipeline == calls


def test_a_wrong_request_is_not_sent_again_and_names_its_field(head: Head, generate: Generate) -> None:
    error = MeshError(
        Reason.INVALID_REQUEST, "temperature: -1: must be at least 0", field="sampling[writer].temperature"
    )
    scripted = head(failing(error))
    with pytest.raises(InvalidRequest) as caught:
        generate(scripted.address, sampling={"writer": Llm(temperature=-1)})
    assert caught.value.field == "sampling[writer].temperature"
    assert str(caught.value) == "temperature: -1: must be at least 0"
    assert len(scripted.requests) == 1


def test_a_broken_stream_is_resumed_with_what_had_come(head: Head, generate: Generate) -> None:
    def breaks(request, context):  # type: ignore[no-untyped-def]
        yield text(request, 1, "a ", 11)
        yield text(request, 2, "red ", 12, 13)
        fail(context, MeshError(Reason.UNREACHABLE, "the head stops"))

    def goes_on(request, context):  # type: ignore[no-untyped-def]
        assert request.resume.sequence == 2
        (stage,) = request.resume.stages
        assert (stage.stage, list(stage.token_ids), stage.text, stage.finished) == (
            "writer", [11, 12, 13], "a red ", False,
        )  # fmt: skip
        yield text(request, 3, "circle", 14)
        yield the_end(request, 4)

    scripted = head(breaks, goes_on)
    frames = generate(scripted.address)
    assert joined(frames) == "a red circle"
    assert [frame.sequence for frame in frames] == [1, 2, 3, 4]
    assert scripted.requests[0].request_id == scripted.requests[1].request_id


def test_a_head_that_dies_and_returns_is_a_pause(head: Head, generate: Generate) -> None:
    died = threading.Event()

    def hangs(request, context):  # type: ignore[no-untyped-def]
        yield text(request, 1, "a red ", 11, 12)
        first_sent.set()
        died.wait(20)

    def goes_on(request, context):  # type: ignore[no-untyped-def]
        yield text(request, 2, f"circle after {list(request.resume.stages[0].token_ids)}", 13)
        yield the_end(request, 3)

    first_sent = threading.Event()
    old = head(hangs)

    def replace() -> None:
        assert first_sent.wait(10)
        old.stop()
        head(goes_on, port=old.port)

    replacing = threading.Thread(target=replace)
    replacing.start()
    try:
        assert joined(generate(old.address)) == "a red circle after [11, 12]"
    finally:
        died.set()
        replacing.join(10)


def test_a_head_that_has_not_noticed_the_break_is_asked_again(head: Head, generate: Generate) -> None:
    def breaks(request, context):  # type: ignore[no-untyped-def]
        yield text(request, 1, "a red ", 11)
        fail(context, MeshError(Reason.UNREACHABLE))

    def goes_on(request, context):  # type: ignore[no-untyped-def]
        yield text(request, 2, "circle", 12)
        yield the_end(request, 3)

    scripted = head(breaks, failing(MeshError(Reason.DUPLICATE_REQUEST)), goes_on)
    assert joined(generate(scripted.address)) == "a red circle"
    assert len(scripted.requests) == 3


def test_resuming_is_given_up_after_the_window(head: Head, generate: Generate) -> None:
    def breaks(request, context):  # type: ignore[no-untyped-def]
        yield text(request, 1, "a red ", 11)
        fail(context, MeshError(Reason.UNREACHABLE))

    scripted = head(breaks, failing(MeshError(Reason.UNREACHABLE)))
    begin = time.monotonic()
    with pytest.raises(Unreachable):
        generate(scripted.address, client={"resume_window": 0.4})
    assert 0.3 < time.monotonic() - begin < 5


def test_a_loss_that_cannot_be_made_good_is_an_error_after_the_frames(head: Head, generate: Generate) -> None:
    def loses(request, context):  # type: ignore[no-untyped-def]
        yield text(request, 1, "a red ", 11)
        fail(context, MeshError(Reason.STAGE_LOST, "writer/0 was lost after 1 token", delivered_tokens=1))

    with pytest.raises(StageLost, match="after 1 token") as caught:
        generate(head(loses).address)
    assert caught.value.metadata["delivered_tokens"] == "1" and not caught.value.retryable


def test_several_completions_are_not_resumed(head: Head, generate: Generate) -> None:
    def breaks(request, context):  # type: ignore[no-untyped-def]
        yield text(request, 1, "a", 11)
        yield text(request, 2, "b", 12, index=1)
        fail(context, MeshError(Reason.UNREACHABLE))

    scripted = head(breaks, whole_answer)
    with pytest.raises(Unreachable):
        generate(scripted.address)
    assert len(scripted.requests) == 1


def test_a_deadline_ends_the_request_on_both_sides(head: Head, generate: Generate) -> None:
    done = threading.Event()

    def script(request, context):  # type: ignore[no-untyped-def]
        done.wait(20)
        yield the_end(request, 1)

    scripted = head(script)
    try:
        with pytest.raises(RequestTimeout, match=r"within 0.4 s"):
            generate(scripted.address, timeout=0.4)
        assert scripted.cancelled.wait(5)
    finally:
        done.set()


def test_no_head_at_the_address_is_said_in_one_line(generate: Generate) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(Unreachable, match=rf"^no head answers at {address}$"):
        generate(address, client={"max_retries": 0})


def test_a_stream_without_its_end_is_an_error(head: Head, generate: Generate) -> None:
    def stops(request, context):  # type: ignore[no-untyped-def]
        yield text(request, 1, "a", 1)

    with pytest.raises(InternalError, match="without saying"):
        generate(head(stops).address)


def test_unknown_pipeline_is_not_found(head: Head, generate: Generate) -> None:
    with pytest.raises(NotFound, match="no pipeline 'x'"):
        generate(head(failing(MeshError(Reason.UNKNOWN_PIPELINE, "no pipeline 'x'"))).address, pipeline="x")


def test_parameters_that_fit_both_kinds_of_stage_ask_the_pipeline_once(head: Head, generate: Generate) -> None:
    scripted = head(whole_answer)
    generate(scripted.address, sampling={"writer": {"seed": 1}, "painter": {"seed": 2}})
    writer, painter = scripted.requests[0].sampling
    assert (writer.stage, writer.params.llm.seed, writer.params.WhichOneof("params")) == ("writer", 1, "llm")
    assert (painter.params.diffusion.seed, painter.params.WhichOneof("params")) == (2, "diffusion")
    assert scripted.asked_pipeline == 1
    generate(scripted.address, sampling={"writer": {"temperature": 0}, "painter": Diffusion(seed=2)})
    assert scripted.asked_pipeline == 1


def test_the_rest_of_the_request_reaches_the_head(head: Head, generate: Generate) -> None:
    scripted = head(whole_answer)
    generate(
        scripted.address,
        "a wish",
        pipeline="shapes",
        outputs=["image", "writer"],
        negative="blur",
        mode="final",
        priority=-2,
        session_id="s",
        recovery="exact_or_fail",
        lora="crayon",
        lora_scale=0.5,
        cache_salt="tenant",
    )
    (request,) = scripted.requests
    assert request.prompt.text == "a wish" and request.prompt.negative_text == "blur"
    assert list(request.output_modalities) == [frame_pb.MODALITY_IMAGE] and list(request.output_stages) == ["writer"]
    assert (request.pipeline, request.priority, request.session_id) == ("shapes", -2, "s")
    assert (request.lora.name, request.lora.scale, request.cache_salt) == ("crayon", 0.5, "tenant")
    assert request.output_mode == 2 and request.recovery_policy == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "slow"}, "mode: 'slow': want one of delta, final"),
        ({"recovery": "maybe"}, "recovery: 'maybe': want one of best_effort, exact_or_fail"),
        ({"request_id": "a b"}, "request_id: 'a b': want 1 to 128 characters"),
        ({"timeout": 0}, "timeout: 0: want seconds, above 0"),
        ({"prompt": "a" * (64 << 20)}, "bytes with its media: a message is at most 67108864"),
        ({"prompt": 3}, "prompt: 3: want a text, chat messages"),
        ({"sampling": {"painter": {"num_inference_step": 3}}}, "did you mean num_inference_steps?"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(
    head: Head, generate: Generate, arguments: dict[str, Any], words: str
) -> None:
    scripted = head(whole_answer)
    with pytest.raises(InvalidRequest) as caught:
        generate(scripted.address, **arguments)
    assert words in str(caught.value)
    assert not scripted.requests


def test_wrong_arguments_of_the_sync_client_are_refused_without_iterating(head: Head) -> None:
    with Client(head(whole_answer).address) as client, pytest.raises(InvalidRequest):
        client.generate("a wish", mode="slow")

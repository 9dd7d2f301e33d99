"""`stagemesh generate`: what it prints, saves, sends, and how it ends."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import numpy as np
import pytest

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.tensors import encode
from stagemesh.v1 import frame_pb2 as frame_pb
from tests.unit.cli.conftest import Command
from tests.unit.client.scripted_head import failing, framed, text, the_end


def picture(request, context):  # type: ignore[no-untyped-def]
    yield text(request, 1, "a red ", 1)
    yield text(request, 2, "circle", 2)
    for step in (1, 2):
        progress = frame_pb.Progress(step=step, total_steps=2)
        yield framed(request, 2 + step, frame_pb.Frame(stage="painter", progress=progress))
    media = frame_pb.MediaOutput(
        modality=frame_pb.MODALITY_IMAGE, mime_type="image/png", data=b"png!", width=64, height=64, seed=7
    )
    yield framed(request, 5, frame_pb.Frame(stage="painter", media=media))
    end = the_end(request, 6)
    painter = end.finished.stages.add(stage="painter")
    painter.finished.usage.diffusion_steps = 2
    painter.finished.timings.total.FromMilliseconds(410)
    yield end


def test_text_pictures_and_timings_are_shown_and_saved(mesh, command: Command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    mesh(picture)
    ended = command("generate", "a wish", "--out", str(tmp_path), "--id", "mine")
    assert ended.code == 0
    saved = tmp_path / "mine-painter-0.png"
    assert ended.out.splitlines() == ["writer: a red circle", f"painter: saved {saved} (64 × 64, 4 bytes, seed 7)"]
    assert saved.read_bytes() == b"png!"
    assert "410 ms" in ended.err and "2 steps" in ended.err and "mine: 1.50 s" in ended.err


def test_json_is_a_line_a_frame_with_paths_for_files(mesh, command: Command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    mesh(picture)
    ended = command("generate", "a wish", "--json", "--out", str(tmp_path))
    lines = [json.loads(line) for line in ended.out.splitlines()]
    kinds = [line["type"] for line in lines]
    assert kinds == ["text_delta", "text_delta", "progress", "progress", "image", "finished"]
    assert "data" not in lines[4] and Path(lines[4]["path"]).read_bytes() == b"png!"
    assert lines[5]["stages"]["painter"]["usage"]["diffusion_steps"] == 2


def speech(request, context):  # type: ignore[no-untyped-def]
    for number in range(3):
        samples = encode(np.full(4, number / 2, np.float32))
        chunk = frame_pb.AudioChunk(sample_rate_hz=16000, offset_samples=4 * number, last=number == 2)
        chunk.samples.inline.CopyFrom(samples)
        yield framed(request, 1 + number, frame_pb.Frame(stage="speaker", audio_chunk=chunk))
    yield the_end(request, 4)


@pytest.mark.parametrize("as_json", [False, True])
def test_pieces_of_sound_become_one_file(mesh, command: Command, tmp_path: Path, as_json: bool) -> None:  # type: ignore[no-untyped-def]
    mesh(speech)
    ended = command("generate", "hello", "--out", str(tmp_path), "--id", "mine", *(["--json"] if as_json else []))
    saved = tmp_path / "mine-speaker-0.wav"
    if as_json:
        lines = [json.loads(line) for line in ended.out.splitlines()]
        assert [line["samples"] for line in lines[:3]] == [4, 4, 4]
        assert [line.get("path") for line in lines[:3]] == [None, None, str(saved)]
    else:
        assert ended.out.splitlines() == [f"speaker: saved {saved} (68 bytes)"]
    with wave.open(str(saved)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16000, 1, 2)
        assert np.frombuffer(file.readframes(99), "<i2").tolist() == [0] * 4 + [16383] * 4 + [32767] * 4


def test_what_was_asked_reaches_the_head(mesh, command: Command) -> None:  # type: ignore[no-untyped-def]
    head = mesh(picture)
    settings = ["painter.seed=9", "1.output_format=webp", 'writer.stop=["."]', "writer.structured_outputs.regex=a+"]
    options = [word for setting in settings for word in ("--set", setting)]
    ended = command("generate", "-", *options, "--output", "text", "--negative", "blur", "--final", stdin=" a wish\n")
    assert ended.code == 0, ended.err
    (request,) = head.requests
    by_stage = {row.stage: row.params for row in request.sampling}
    assert by_stage["painter"].diffusion.seed == 9 and by_stage["painter"].diffusion.output_format == "webp"
    assert list(by_stage["writer"].llm.stop) == ["."] and by_stage["writer"].llm.structured_outputs.regex == "a+"
    assert request.prompt.text == "a wish" and request.prompt.negative_text == "blur"
    assert list(request.output_modalities) == [frame_pb.MODALITY_TEXT] and request.output_mode == 2


def test_media_go_with_the_prompt(mesh, command: Command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    head = mesh(picture)
    (tmp_path / "cat.png").write_bytes(b"PNG")
    ended = command("generate", "a wish", "-m", str(tmp_path / "cat.png"), "--media", "https://h/dog.jpg")
    assert ended.code == 0, ended.err
    cat, dog = head.requests[0].prompt.media
    assert (cat.modality, cat.data, dog.modality, dog.url) == ("image", b"PNG", "image", "https://h/dog.jpg")
    ended = command("generate", "a wish", "-m", str(tmp_path / "gone.png"))
    assert ended.code == 11 and "media[0]" in ended.err and "cannot be read" in ended.err


def test_a_system_message_makes_a_chat(mesh, command: Command) -> None:  # type: ignore[no-untyped-def]
    head = mesh(picture)
    command("generate", "a wish", "--system", "be short")
    messages = head.requests[0].prompt.chat.messages
    assert [(message.role, message.content) for message in messages] == [("system", "be short"), ("user", "a wish")]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("painter.seed", "want STAGE.FIELD=VALUE"),
        ("printer.seed=1", "'printer' is no stage of shapes; its stages are writer, painter"),
        ("painter.=1", "want STAGE.FIELD=VALUE"),
    ],
)
def test_wrong_settings_are_usage_errors(mesh, command: Command, setting: str, words: str) -> None:  # type: ignore[no-untyped-def]
    mesh(picture)
    ended = command("generate", "a wish", "--set", setting)
    assert ended.code == 2
    assert words in " ".join(ended.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("error", "code", "line", "hint"),
    [
        (MeshError(Reason.INVALID_REQUEST, "prompt: '': is empty"), 11, "error: prompt: '': is empty", ""),
        (MeshError(Reason.UNKNOWN_PIPELINE, "no pipeline 'x'"), 12, "error: no pipeline 'x'", "stagemesh status"),
        (MeshError(Reason.UNAUTHENTICATED), 13, "error: a valid token", "--token-file"),
        (MeshError(Reason.NO_LIVE_REPLICA, "no painter", retry_delay_s=0.01), 21, "error: no painter", "status"),
        (MeshError(Reason.OVERLOADED, "full", retry_delay_s=0.01), 22, "error: full", "try again in 0.01 s"),
        (MeshError(Reason.REQUEST_TIMEOUT, "late"), 23, "error: late", "--timeout"),
        (MeshError(Reason.STAGE_LOST, "lost after 3 tokens"), 24, "error: lost after 3 tokens", ""),
        (MeshError(Reason.REQUEST_ABORTED, "aborted"), 26, "error: aborted", ""),
    ],
)
def test_an_error_is_one_line_with_a_hint_and_a_status_of_its_band(  # type: ignore[no-untyped-def]
    mesh, command: Command, error: MeshError, code: int, line: str, hint: str
) -> None:
    mesh(failing(error))
    ended = command("generate", "a wish")
    assert ended.code == code
    first, *rest = ended.err.splitlines()
    assert first.startswith(line)
    assert "Traceback" not in ended.err
    assert (hint in rest[0] and rest[0].startswith("hint: ")) if hint else not rest


def test_no_head_is_said_with_the_way_to_get_one(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEMESH_HEAD", "127.0.0.1:1")
    ended = command("generate", "a wish")
    assert ended.code == 20
    assert ended.err.splitlines()[0] == "error: no head answers at 127.0.0.1:1"
    assert "stagemesh up" in ended.err


def test_control_characters_of_a_model_do_not_reach_a_terminal() -> None:
    from stagemesh.cli.frames_shown import _harmless

    assert _harmless("a\x1b[2J\rb\n\tö語") == "a[2Jb\n\tö語"


def test_a_folder_that_cannot_be_made_is_the_users_mistake(mesh, command: Command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    mesh(picture)
    (tmp_path / "file").write_text("")
    ended = command("generate", "a wish", "--out", str(tmp_path / "file" / "below"))
    assert ended.code == 10 and "Not a directory" in ended.err and "Traceback" not in ended.err

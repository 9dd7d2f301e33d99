"""The speak example on real engines: thinker and talker on vLLM, and its own synthesiser, as they stream."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator

import numpy as np
import pytest

import stagemesh
from stagemesh import AudioChunk, Client, StageFinished, TextDelta
from stagemesh.client.admin import AdminClient
from stagemesh.v1 import registry_pb2 as registry_pb
from tests.engines.speak import SPEAK
from tests.mesh.faults.processes import eventually

# isort: split
from codes import FIRST_CODE, codes_of
from speech import sentence
from voice import FRAME, RATE_HZ, Voice

WISHES = json.loads((SPEAK.parent / "shapes/training/held_out.json").read_text())["wishes"][:24]
PITCH_HZ = 110.0
CHUNK_BUDGET = 400
"""Codes that a talker goes on for which does not stop by itself."""

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def mesh() -> Iterator[stagemesh.Mesh]:
    """The example, with the talker's codes as a further output, to look at."""
    overrides = {"talker": {"final_output": True}}
    with stagemesh.Mesh(SPEAK / "pipeline.yaml", stage_overrides=overrides, start_timeout=200) as mesh:
        yield mesh


@pytest.fixture
def client(mesh: stagemesh.Mesh) -> Iterator[Client]:
    with Client(mesh.address) as client:
        yield client


def replicas(mesh: stagemesh.Mesh) -> dict[str, registry_pb.ReplicaStatus]:
    with AdminClient(mesh.address) as admin:
        return {row.report.replica.stage: row for row in admin.list_replicas()[0]}


def all_is_quiet(mesh: stagemesh.Mesh) -> bool:
    with AdminClient(mesh.address) as admin:
        return not admin.list_requests() and not any(row.report.load.running for row in replicas(mesh).values())


class Answer:
    """All frames of one request."""

    def __init__(self, client: Client, wish: str, **options: object) -> None:
        self.frames = list(client.generate(wish, timeout=120, **options))  # type: ignore[arg-type]
        deltas = [frame for frame in self.frames if isinstance(frame, TextDelta)]
        self.text = "".join(delta.text for delta in deltas if delta.stage == "thinker")
        self.tokens = [token for delta in deltas if delta.stage == "talker" for token in delta.token_ids]
        self.codes = codes_of(self.tokens)
        self.pieces = [frame for frame in self.frames if isinstance(frame, AudioChunk)]
        self.sound = np.concatenate([piece.samples for piece in self.pieces])


def test_held_out_captions_are_spoken_as_they_should_be_and_the_sound_is_that_of_the_codes(client: Client) -> None:
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda row: Answer(client, row["wish"]), WISHES))
    right = sum(
        row["caption"] == answer.text and answer.codes == sentence(answer.text)
        for row, answer in zip(WISHES, answers, strict=True)
    )
    print(f"{right} of {len(WISHES)} spoken exactly")
    assert right >= 0.9 * len(WISHES)
    for answer in answers:
        assert len(answer.sound) == len(answer.codes) * FRAME
        assert [piece.last for piece in answer.pieces] == [False] * (len(answer.pieces) - 1) + [True]
        ends = np.cumsum([len(piece.samples) for piece in answer.pieces])
        assert [piece.offset_samples for piece in answer.pieces] == [0, *ends[:-1]]
    for answer in answers[:3]:
        assert np.array_equal(answer.sound, Voice(PITCH_HZ).speak(answer.codes))
        ends = {frame.stage: frame for frame in answer.frames if isinstance(frame, StageFinished)}
        assert ends["synthesiser"].usage.audio_seconds == pytest.approx(len(answer.sound) / RATE_HZ)


def test_R9_sound_comes_while_the_talker_still_talks(client: Client) -> None:
    answer = Answer(client, "a big ring of gold on the lawn")
    first_sound = next(n for n, frame in enumerate(answer.frames) if isinstance(frame, AudioChunk))
    talker_ends = next(
        n for n, frame in enumerate(answer.frames) if isinstance(frame, StageFinished) and frame.stage == "talker"
    )
    said = [frame for frame in answer.frames[:first_sound] if isinstance(frame, TextDelta) and frame.stage == "talker"]
    assert first_sound < talker_ends
    assert sum(len(frame.token_ids) for frame in said) < len(answer.tokens) / 2
    assert len(answer.pieces) > 5, "it comes in pieces, as it is made"


def test_request_may_choose_the_voice(client: Client) -> None:
    answer = Answer(client, "a pea", sampling={"synthesiser": {"extra": {"pitch_hz": 200}}})
    assert np.array_equal(answer.sound, Voice(200).speak(answer.codes))


def test_client_that_leaves_stops_all_three(mesh: stagemesh.Mesh, client: Client) -> None:
    eventually("nothing runs", lambda: all_is_quiet(mesh), 20)
    before = replicas(mesh)["talker"].report.load.engine_steps
    endless = {"talker": {"max_tokens": CHUNK_BUDGET, "ignore_eos": True}}
    frames = client.generate("a pea", sampling=endless, timeout=60)
    assert any(isinstance(frame, AudioChunk) for frame in frames)  # up to the first one
    frames.close()
    eventually("nothing runs", lambda: all_is_quiet(mesh), 20)
    assert replicas(mesh)["talker"].report.load.engine_steps - before < CHUNK_BUDGET
    assert Answer(client, "a pea").pieces[-1].last


@pytest.mark.parametrize(
    ("wish", "sampling", "field"),
    [
        ("", {}, "prompt"),
        ("a pea", {"talker": {"temperature": -1}}, "temperature"),
        ("a pea", {"talker": {"stop": ["AA4"]}}, "stop"),
        ("a pea", {"synthesiser": {"extra": {"pitch_hz": 5000}}}, "pitch_hz"),
        ("a pea", {"synthesiser": {"extra": {"speed": 2}}}, "speed"),
        # The talker made to write a letter: no code.
        ("a pea", {"talker": {"allowed_token_ids": [FIRST_CODE - 1]}}, f"token {FIRST_CODE - 1} is no code"),
    ],
    ids=["empty prompt", "temperature", "stop text on a stream", "pitch", "unknown extra", "no code"],
)
def test_bad_request_is_refused_by_name_and_nothing_goes_on(
    mesh: stagemesh.Mesh, client: Client, wish: str, sampling: dict, field: str
) -> None:
    with pytest.raises(stagemesh.InvalidRequest, match=field):
        list(client.generate(wish, sampling=sampling, timeout=30))
    eventually("nothing runs", lambda: all_is_quiet(mesh), 20)

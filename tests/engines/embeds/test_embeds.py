"""The embeds example on real engines: hidden states of one vLLM engine are the prompt of another."""

from __future__ import annotations

import concurrent.futures
import json
import random
from collections.abc import Iterator

import pytest

import stagemesh
from stagemesh import Client, Finished, TextDelta
from stagemesh.client.admin import AdminClient
from tests.engines.embeds import EMBEDS
from tests.mesh.faults.processes import eventually

# isort: split
from sentences import in_english, in_german
from world import HELD_OUT_SCENES, Scene

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def mesh() -> Iterator[stagemesh.Mesh]:
    with stagemesh.Mesh(EMBEDS / "pipeline.yaml", start_timeout=200) as mesh:
        yield mesh


@pytest.fixture
def client(mesh: stagemesh.Mesh) -> Iterator[Client]:
    with Client(mesh.address) as client:
        yield client


def translate(client: Client, sentence: str) -> tuple[str, Finished]:
    frames = list(client.generate(sentence, timeout=120))
    assert isinstance(frames[-1], Finished)
    return "".join(frame.text for frame in frames if isinstance(frame, TextDelta)), frames[-1]


def count_right(client: Client, cases: list[tuple[str, str]]) -> int:
    """Of (English, German) pairs."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda case: translate(client, case[0])[0], cases))
    wrong = [(*case, answer) for case, answer in zip(cases, answers, strict=True) if case[1] != answer]
    print(f"{len(cases) - len(wrong)} of {len(cases)} exact", *wrong, sep="\n")
    return len(cases) - len(wrong)


def test_scenes_that_neither_model_has_seen_are_said_in_german(client: Client) -> None:
    rng = random.Random(2026)
    cases = [(in_english(scene, rng), in_german(scene)) for scene in HELD_OUT_SCENES]
    assert count_right(client, cases) >= 0.95 * len(cases)


def test_wishes_in_free_words_are_understood_too(client: Client) -> None:
    rows = json.loads((EMBEDS.parent / "shapes/training/held_out.json").read_text())["wishes"]
    cases = [
        (row["wish"], in_german(Scene(row["size"], row["colour"], row["shape"], row["background"]))) for row in rows
    ]
    assert count_right(client, cases) >= 0.9 * len(cases)


def test_prompt_of_the_second_engine_is_the_first_ones_tensor(client: Client) -> None:
    for sentence in ("a red star on a white background", "a little blue ring"):
        text, finished = translate(client, sentence)
        reader, translator = finished.stages["reader"], finished.stages["translator"]
        assert text.startswith("ein ") and not reader.usage.completion_tokens
        assert translator.usage.prompt_tokens == reader.usage.prompt_tokens > 3
        assert translator.timings.transfer_s > 0


@pytest.mark.parametrize(
    ("sentence", "sampling", "error", "field"),
    [
        ("", {}, stagemesh.InvalidRequest, "prompt"),
        ("red " * 300, {}, stagemesh.InvalidRequest, "prompt: has 301 tokens"),
        ("a red star", {"reader": {"extra": {"pooling_task": "classify"}}}, stagemesh.InvalidRequest, "pooling_task"),
        ("a red star", {"translator": {"temperature": -1}}, stagemesh.InvalidRequest, "temperature"),
    ],
    ids=["empty prompt", "too long", "pooling task", "temperature"],
)
def test_bad_request_is_refused_by_name_and_nothing_goes_on(
    mesh: stagemesh.Mesh, client: Client, sentence: str, sampling: dict, error: type, field: str
) -> None:
    with pytest.raises(error, match=field):
        list(client.generate(sentence, sampling=sampling, timeout=30))
    with AdminClient(mesh.address) as admin:
        eventually("nothing runs", lambda: not admin.list_requests(), 20)

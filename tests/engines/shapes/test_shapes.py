"""The shapes example on real engines, through real processes: one writer on vLLM, two painters on diffusers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import stagemesh
from stagemesh import Client, Finished, Image, Progress, StageFinished, TextDelta
from stagemesh.client.admin import AdminClient
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from tests.mesh.faults.processes import eventually

SHAPES = Path(__file__).resolve().parents[3] / "examples/shapes"
sys.path.insert(0, str(SHAPES / "training"))
from judge import judge_caption, judge_picture  # noqa: E402
from world import Scene, caption_to_avoid  # noqa: E402

WISHES = json.loads((SHAPES / "training/held_out.json").read_text())["wishes"]
READY = replica_pb.REPLICA_STATE_READY
STEPS_IN_FLIGHT = 4
"""Progress that was under way to the client when it left: a step takes about 10 ms, merged flushes up to 20 ms."""

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def mesh() -> Iterator[stagemesh.Mesh]:
    overrides = {"painter": {"runtime": {"num_replicas": 2}}}
    with stagemesh.Mesh(SHAPES / "pipeline.yaml", stage_overrides=overrides, start_timeout=200) as mesh:
        yield mesh


@pytest.fixture
def client(mesh: stagemesh.Mesh) -> Iterator[Client]:
    with Client(mesh.address) as client:
        yield client


def replicas(mesh: stagemesh.Mesh, stage: str = "") -> list[registry_pb.ReplicaStatus]:
    with AdminClient(mesh.address) as admin:
        return admin.list_replicas(stage=stage)[0]


class Answer:
    """All frames of one request."""

    def __init__(self, client: Client, wish: str, **options: object) -> None:
        self.frames = list(client.generate(wish, timeout=120, **options))  # type: ignore[arg-type]
        self.text = "".join(frame.text for frame in self.frames if isinstance(frame, TextDelta))
        (self.image,) = (frame for frame in self.frames if isinstance(frame, Image))


def test_fifty_held_out_wishes_are_written_and_drawn_right(client: Client) -> None:
    assert len(WISHES) == 50
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(
                lambda pair: Answer(client, pair[1]["wish"], sampling={"painter": {"seed": 1000 + pair[0]}}),
                enumerate(WISHES),
            )
        )
    right = Counter[str]()
    for row, answer in zip(WISHES, answers, strict=True):
        scene = Scene(row["size"], row["colour"], row["shape"], row["background"])
        right["caption"] += judge_caption(answer.text, scene).everything
        verdict = judge_picture(answer.image.to_pil(), scene)
        right["colour and background"] += verdict.colour and verdict.background
        right["shape"] += verdict.shape
    print(dict(right))
    assert right["caption"] >= 47, right
    assert right["colour and background"] >= 48, right
    assert right["shape"] >= 45, right


def test_text_streams_before_the_picture_with_progress_between(client: Client) -> None:
    answer = Answer(client, "a big ring of gold on the lawn")
    kinds = [type(frame).__name__ for frame in answer.frames]
    assert answer.text == "a large yellow ring on a green background"
    assert kinds.count("TextDelta") > 3, "the caption comes as it is written"
    steps = [frame.step for frame in answer.frames if isinstance(frame, Progress)]
    assert steps[-1] == 20 and steps == sorted(steps)
    assert kinds.index("TextDelta") < kinds.index("Progress") < kinds.index("Image")
    assert kinds[-1] == "Finished"


def test_R10_what_to_avoid_is_written_by_a_companion_unless_the_client_says_it(client: Client) -> None:
    wish, sampling = "a small red star at night", {"painter": {"seed": 11}}
    avoided = caption_to_avoid(Scene("small", "red", "star", "black"))
    guided = Answer(client, wish, sampling=sampling)
    (end,) = (frame for frame in guided.frames if isinstance(frame, Finished))
    companion, writer = end.companions["-negative"], end.stages["writer"]
    assert companion.usage.completion_tokens > 5
    assert companion.replicas == writer.replicas
    assert end.usage.completion_tokens == companion.usage.completion_tokens + writer.usage.completion_tokens
    pictures = {}
    for said in (avoided, "a large blue ring on a black background"):
        own = Answer(client, wish, negative=said, sampling=sampling)
        assert own.text == guided.text == "a small red star on a black background"
        (end,) = (frame for frame in own.frames if isinstance(frame, Finished))
        assert not end.companions, "nobody reads it"
        pictures[said] = own.image.data
    assert pictures[avoided] == guided.image.data, "the painter was given what the companion wrote"
    assert len(set(pictures.values())) == 2


def test_both_painters_have_cores_of_their_own_and_share_the_load(mesh: stagemesh.Mesh, client: Client) -> None:
    rows = replicas(mesh, "painter")
    assert sorted(row.report.device_ids[0] for row in rows) == ["cpu:0", "cpu:1"]
    cores = sorted(list(psutil.Process(row.report.pid).cpu_affinity() or ()) for row in rows)
    assert cores == [[0], [1]]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: Answer(client, f"a {WISHES[i]['caption'][2:]}"), range(8)))
    assert Counter(answer.image.replica_id for answer in answers).keys() == {0, 1}


def test_same_seed_gives_the_same_picture_on_either_painter(client: Client) -> None:
    pictures: dict[int, set[bytes]] = {}
    deadline = time.monotonic() + 90
    while len(pictures) < 2 and time.monotonic() < deadline:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for answer in pool.map(
                lambda _: Answer(client, "a small red star at night", sampling={"painter": {"seed": 5}}), range(4)
            ):
                pictures.setdefault(answer.image.replica_id, set()).add(answer.image.data)
                assert answer.image.seed == 5
    assert sorted(pictures) == [0, 1]
    assert len(pictures[0] | pictures[1]) == 1


def test_R13_client_that_leaves_stops_the_denoising_within_two_steps(mesh: stagemesh.Mesh, client: Client) -> None:
    def steps() -> dict[int, int]:
        return {r.report.replica.replica_id: r.report.load.engine_steps for r in replicas(mesh, "painter")}

    eventually("the painters are idle", lambda: not any(r.report.load.running for r in replicas(mesh, "painter")), 20)
    time.sleep(1.5)  # the last load reports are in
    before = steps()
    frames = client.generate("a pea", sampling={"painter": {"num_inference_steps": 400}}, timeout=60)
    for frame in frames:
        if isinstance(frame, Progress) and frame.step >= 3:
            break
    frames.close()
    eventually("the painters are idle", lambda: not any(r.report.load.running for r in replicas(mesh, "painter")), 10)
    time.sleep(1.5)
    made = steps()[frame.replica_id] - before[frame.replica_id]
    # Steps that were made while the cancellation travelled are those the client did not see.
    assert frame.step <= made <= frame.step + STEPS_IN_FLIGHT + 2, (frame.step, made)


@pytest.mark.parametrize(
    ("wish", "options", "field"),
    [
        ("", {}, "prompt"),
        ("a pea", {"pipeline": "nope"}, "nope"),
        ("a pea", {"sampling": {"writer": {"temperature": -1}}}, "temperature"),
        ("a pea", {"sampling": {"painter": {"num_inference_steps": 0}}}, "num_inference_steps"),
        ("a" * 100_000_000, {}, "prompt"),
    ],
    ids=["empty prompt", "unknown pipeline", "negative temperature", "no steps", "100 MB prompt"],
)
def test_bad_request_is_refused_by_name_and_nothing_is_submitted(
    mesh: stagemesh.Mesh, client: Client, wish: str, options: dict, field: str
) -> None:
    before = [row.report.load.engine_steps for row in replicas(mesh)]
    with pytest.raises((stagemesh.InvalidRequest, stagemesh.NotFound), match=field):
        list(client.generate(wish, timeout=30, **options))
    with AdminClient(mesh.address) as admin:
        assert admin.list_requests() == []
    assert [row.report.load.engine_steps for row in replicas(mesh)] == before


def test_killed_engine_core_is_reported_restarted_and_no_other_request_fails(
    mesh: stagemesh.Mesh, client: Client
) -> None:
    (row,) = replicas(mesh, "writer")
    children = psutil.Process(row.report.pid).children(recursive=True)
    core = next(child for child in children if child.pid != row.report.pid)
    pictures: list[object] = []

    def paint() -> None:
        with Client(mesh.address) as other:
            # Long enough for several load reports, which come about once a second.
            pictures.append(Answer(other, "a pea", sampling={"painter": {"num_inference_steps": 600}}))

    events: list[str] = []

    def watch() -> None:
        with AdminClient(mesh.address) as admin, contextlib.suppress(stagemesh.StageMeshError):
            for event in admin.watch_events():
                events.append(f"{event.type} {event.replica.stage} {event.reason}")

    threading.Thread(target=watch, daemon=True).start()
    thread = threading.Thread(target=paint)
    thread.start()
    eventually("a painter works", lambda: any(r.report.load.running for r in replicas(mesh, "painter")), 20)
    os.kill(core.pid, signal.SIGKILL)
    eventually("its replica is no longer ready", lambda: replicas(mesh, "writer")[0].state != READY, 10)
    again = eventually(
        "it is ready again",
        lambda: [r for r in replicas(mesh, "writer") if r.state == READY and r.report.pid != row.report.pid],
        120,
    )[0]
    assert again.report.restarts == row.report.restarts + 1
    thread.join(60)
    assert len(pictures) == 1, "the picture that was being painted never failed"
    assert Answer(client, "a pea").text
    assert any("writer" in event for event in events), events


def test_R7_last_frame_has_usage_and_timings(client: Client) -> None:
    answer = Answer(client, "a plum")
    ends = {frame.stage: frame for frame in answer.frames if isinstance(frame, StageFinished)}
    assert ends["writer"].usage.completion_tokens > 5 and ends["painter"].usage.diffusion_steps == 20
    assert ends["painter"].timings.total_s > 0

"""The disaggregated example on real engines: two that prefill and one that decodes, also while one is killed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import stagemesh
from stagemesh import Client, Finished, Llm, TextDelta
from stagemesh.client.admin import AdminClient
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from tests.mesh.faults.processes import eventually

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/disaggregated/pipeline.yaml"
WISH, CAPTION = "a big ring of gold on the lawn", "a large yellow ring on a green background"
CAPTIONS = {
    WISH: CAPTION,
    "a pea": "a small green circle on a white background",
    "what about a gigantic milky triangle among the galaxies": "a large white triangle on a black background",
}
"""Wish -> what the same model writes greedily in one piece, under transformers."""
LONG = {"max_tokens": 150, "ignore_eos": True}
"""Of the decode stage: an answer that is still being written when something happens to it."""
FREE_S = 120.0

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None, reason="nixl is not installed: examples/disaggregated/README.md"
    ),
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[stagemesh.Mesh]:
    overrides = {"prefill": {"runtime": {"num_replicas": 2}}}
    with stagemesh.Mesh(EXAMPLE, stage_overrides=overrides, start_timeout=280) as mesh:
        # The prompt with which each proves that it works is counted before anything else is.
        eventually("all have counted", lambda: all(
            row.report.load.prompt_tokens_computed for stage in ("prefill", "decode") for row in replicas(mesh, stage)
        ), 60)  # fmt: skip
        yield mesh


class Answer:
    """All frames of one request."""

    def __init__(self, mesh: stagemesh.Mesh, wish: str = WISH, **decode: Any) -> None:
        with Client(mesh.address) as client:
            frames = list(client.generate(wish, sampling={"decode": decode}, timeout=FREE_S))
        self.texts = [frame for frame in frames if isinstance(frame, TextDelta)]
        self.text = "".join(frame.text for frame in self.texts)
        self.token_ids = [token for frame in self.texts for token in frame.token_ids]
        (self.end,) = (frame for frame in frames if isinstance(frame, Finished))
        self.prefill, self.decode = self.end.stages["prefill"], self.end.stages["decode"]


def replicas(mesh: stagemesh.Mesh, stage: str) -> list[registry_pb.ReplicaStatus]:
    with AdminClient(mesh.address) as admin:
        return admin.list_replicas(stage=stage)[0]


class PromptTokens:
    """What the engines of a stage counted since this was made: prompt tokens by where they came from."""

    def __init__(self, mesh: stagemesh.Mesh, stage: str) -> None:
        self._mesh, self._stage = mesh, stage
        self._before = self._now()

    def _now(self) -> tuple[int, int, int]:
        loads = [row.report.load for row in replicas(self._mesh, self._stage)]
        return (
            sum(load.prompt_tokens_computed for load in loads),
            sum(load.prompt_tokens_cached for load in loads),
            sum(load.prompt_tokens_received for load in loads),
        )

    def become(self, *, computed: int, received: int) -> None:
        """Wait until it is so; loads are reported about once a second."""
        wanted = tuple(a + b for a, b in zip(self._before, (computed, 0, received), strict=True))
        with contextlib.suppress(AssertionError):
            eventually("the counts are right", lambda: self._now() == wanted, 30)
        assert self._now() == wanted


def core_of(report: replica_pb.ReplicaReport) -> psutil.Process:
    children = psutil.Process(report.pid).children(recursive=True)
    return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))


@contextlib.contextmanager
def held(mesh: stagemesh.Mesh, stage: str) -> Iterator[None]:
    """The engines of a stage stand still."""
    cores = [core_of(row.report) for row in replicas(mesh, stage)]
    for core in cores:
        core.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for core in cores:
            with contextlib.suppress(psutil.NoSuchProcess):
                core.send_signal(signal.SIGCONT)


def task_state(mesh: stagemesh.Mesh, stage: str) -> str:
    """Where the one request that runs stands at a stage; "" when none runs."""
    with AdminClient(mesh.address) as admin:
        return next((task.state for row in admin.list_requests() for task in row.tasks if task.stage == stage), "")


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def test_R11_answer_is_the_models_own_and_decode_computes_none_of_the_prompt(mesh: stagemesh.Mesh) -> None:
    prefill, decode = PromptTokens(mesh, "prefill"), PromptTokens(mesh, "decode")
    answers = {wish: Answer(mesh, wish) for wish in CAPTIONS}
    assert {wish: answer.text for wish, answer in answers.items()} == CAPTIONS
    read = sum(answer.prefill.usage.prompt_tokens for answer in answers.values())
    prefill.become(computed=read, received=0)
    decode.become(computed=0, received=read)
    for answer in answers.values():
        assert len(answer.texts) > 5, "it comes as it is written"
        assert answer.end.usage.prompt_tokens == answer.prefill.usage.prompt_tokens, "the prompt counts once"
        assert answer.end.usage.completion_tokens == answer.decode.usage.completion_tokens == len(answer.token_ids)


def test_R11_decode_takes_over_from_the_replica_that_read_the_prompt(mesh: stagemesh.Mesh) -> None:
    decode = PromptTokens(mesh, "decode")
    read, by = 0, set[int]()
    for _ in range(30):
        answer = Answer(mesh)
        assert answer.text == CAPTION
        read += answer.prefill.usage.prompt_tokens
        by |= set(answer.prefill.replicas)
        if by == {0, 1}:
            break
    assert by == {0, 1}
    decode.become(computed=0, received=read)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (Llm(stop=["ring"], max_tokens=30), "a large yellow "),
        (Llm(max_tokens=1), "a"),
        (Llm(structured_outputs={"choice": ["a tiny cat", "a large cat"]}), "a large cat"),
    ],
    ids=["stop text", "one token", "structured"],
)
def test_what_ends_or_shapes_an_answer_is_decodes_alone(mesh: stagemesh.Mesh, params: Llm, text: str) -> None:
    decode = PromptTokens(mesh, "decode")
    with Client(mesh.address) as client:
        frames = list(client.generate(WISH, sampling={"decode": params}, timeout=FREE_S))
    assert "".join(frame.text for frame in frames if isinstance(frame, TextDelta)) == text
    decode.become(computed=0, received=frames[-1].stages["prefill"].usage.prompt_tokens)


def test_several_completions_take_the_hand_off_over_once(mesh: stagemesh.Mesh) -> None:
    decode = PromptTokens(mesh, "decode")
    answer = Answer(mesh, n=2, temperature=0.01, seed=1)
    for index in (0, 1):
        assert "".join(frame.text for frame in answer.texts if frame.index == index) == CAPTION
    read = answer.prefill.usage.prompt_tokens
    # A block that is not full is not shared, and this prompt has no other.
    decode.become(computed=2 * read, received=read)


def test_prefill_killed_after_it_read_the_prompt_costs_a_recomputation(mesh: stagemesh.Mesh) -> None:
    prefill, decode = PromptTokens(mesh, "prefill"), PromptTokens(mesh, "decode")
    undisturbed = Answer(mesh, **LONG)
    prefill.become(computed=undisturbed.prefill.usage.prompt_tokens, received=0)
    reads = {row.report.pid: row.report.load.prompt_tokens_computed for row in replicas(mesh, "prefill")}
    with held(mesh, "decode"):
        thread, answers = in_background(lambda: Answer(mesh, **LONG))
        eventually("decode has it", lambda: task_state(mesh, "decode") == "submitted", 20)

        def reader() -> replica_pb.ReplicaReport | None:
            rows = (row.report for row in replicas(mesh, "prefill"))
            return next((row for row in rows if row.load.prompt_tokens_computed > reads.get(row.pid, 1 << 30)), None)

        report = eventually("one has counted it", reader, 20)
        core = core_of(report)
        os.kill(report.pid, signal.SIGKILL)
        gone, _ = psutil.wait_procs([core], 20)
        assert gone, "its engine ends with it, and the blocks with its engine"
    thread.join(FREE_S)
    (answer,) = answers
    assert answer.decode.recovery == ""
    # What one engine alone makes of the prompt is what it made of the other's KV blocks.
    assert answer.token_ids == undisturbed.token_ids and len(answer.token_ids) == LONG["max_tokens"]
    decode.become(computed=answer.prefill.usage.prompt_tokens, received=undisturbed.prefill.usage.prompt_tokens)
    assert Answer(mesh).text == CAPTION, "the other one goes on"


def test_decode_killed_mid_stream_goes_on_without_a_second_hand_off(mesh: stagemesh.Mesh) -> None:
    undisturbed = Answer(mesh, **LONG)
    (row,) = replicas(mesh, "decode")
    pieces: list[str] = []
    with Client(mesh.address) as client:
        for frame in client.generate(WISH, sampling={"decode": LONG}, timeout=FREE_S):
            if isinstance(frame, TextDelta):
                pieces.append(frame.text)
                if len(pieces) == 10:
                    os.kill(row.report.pid, signal.SIGKILL)
    assert "".join(pieces) == undisturbed.text
    assert isinstance(frame, Finished)
    assert frame.stages["decode"].recovery == "exact"
    assert frame.usage.completion_tokens == LONG["max_tokens"]
    assert len(frame.stages["prefill"].replicas) == 1 and len(frame.stages["decode"].replicas) == 2
    read = frame.stages["prefill"].usage.prompt_tokens

    def again() -> registry_pb.ReplicaStatus | None:
        (now,) = replicas(mesh, "decode")
        return now if now.report.load.prompt_tokens_computed > read and now.report.pid != row.report.pid else None

    assert eventually("it has counted", again, 30).report.load.prompt_tokens_received == 0


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_client_that_leaves_during_either_half_ends_both(mesh: stagemesh.Mesh, stage: str) -> None:
    client = Client(mesh.address)

    def read() -> None:
        with contextlib.suppress(stagemesh.StageMeshError, ValueError):  # gRPC's own word for a closed channel
            list(client.generate(WISH, sampling={"decode": LONG}, timeout=FREE_S))

    with held(mesh, stage):
        thread, _ = in_background(read)
        eventually(f"{stage} has it", lambda: task_state(mesh, stage) == "submitted", 20)
        client.close()
        eventually("the head is done with it", lambda: task_state(mesh, stage) == "", 20)
    thread.join(20)
    eventually(
        "both stages are idle",
        lambda: not any(row.report.load.running or row.inflight for name in ("prefill", "decode")
                        for row in replicas(mesh, name)),
        20,
    )  # fmt: skip
    assert Answer(mesh).text == CAPTION

"""The synthetic engine: everything it makes is a pure function of prompt, parameters and seed."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stagemesh.config import Stage
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_worker.engines import DeviceSet, EngineConfigError, EngineInput, EngineTask
from stagemesh_worker.engines.synthetic import content
from stagemesh_worker.engines.synthetic.engine import SyntheticEngine


class Sink:
    """Notes all that it is given."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.string = ""
        self.steps: list[int] = []
        self.files: list[frame_pb.MediaOutput] = []
        self.chunks: list[frame_pb.AudioChunk] = []
        self.arrays: dict[str, Any] = {}
        self.end: frame_pb.StageFinished | None = None
        self.writable = True

    def started(self, engine_queue_s: float = 0.0) -> None: ...

    def tokens(self, token_ids: Sequence[int], text: str) -> None:
        self.ids += token_ids
        self.string += text

    def text(self, delta: frame_pb.TextDelta) -> None: ...

    def progress(self, progress: frame_pb.Progress) -> None:
        self.steps.append(progress.step)

    def media(self, media: frame_pb.MediaOutput) -> None:
        self.files.append(media)

    def audio(self, chunk: frame_pb.AudioChunk) -> None:
        self.chunks.append(chunk)

    def tensor(self, name: str, array: Any) -> None:
        self.arrays[name] = array

    def finish(self, finished: frame_pb.StageFinished) -> None:
        self.end = finished

    async def ready(self) -> None: ...


def _engine(**options: Any) -> SyntheticEngine:
    stage = Stage.model_validate({"name": "s", "engine": "synthetic", "engine_args": options})
    return SyntheticEngine(stage, DeviceSet(("cpu:0",)))


async def _run(
    prompt: str = "a prompt",
    llm: dict[str, Any] | None = None,
    *,
    engine: SyntheticEngine | None = None,
    more: Sequence[str] | None = None,
    diffusion: dict[str, Any] | None = None,
    **fields: Any,
) -> Sink:
    engine = engine or _engine()
    await engine.start()
    submit = stage_pb.SubmitTask(slot=1, request_id="r", **fields)
    for part, values in ((submit.params.llm, llm), (submit.params.diffusion, diffusion)):
        for name, value in (values or {}).items():
            getattr(part, name).extend(value) if isinstance(value, list) else setattr(part, name, value)

    async def chunks() -> AsyncIterator[EngineInput]:
        for text in more or ():
            yield EngineInput(text=text)

    sink = Sink()
    try:
        await engine.run(EngineTask(submit, EngineInput(text=prompt), chunks() if more is not None else None), sink)
    finally:
        await engine.stop()
    return sink


async def test_two_engines_make_the_same_and_other_prompts_or_seeds_make_others() -> None:
    first, second = await _run(), await _run()
    assert first.ids == second.ids and first.string == second.string == content.text_of(first.ids)
    assert (await _run("another")).ids != first.ids
    sampled = {"temperature": 1.0}
    assert (await _run(llm=sampled | {"seed": 1})).ids != (await _run(llm=sampled | {"seed": 2})).ids


async def test_a_greedy_output_does_not_depend_on_the_seed() -> None:
    greedy = {"temperature": 0.0}
    assert (await _run(llm=greedy | {"seed": 1})).ids == (await _run(llm=greedy | {"seed": 2})).ids


@pytest.mark.parametrize(
    ("llm", "count", "reason"),
    [
        ({}, 100, "STOP"),
        ({"max_tokens": 7}, 7, "LENGTH"),
        ({"max_tokens": 100}, 100, "STOP"),
        ({"max_tokens": 150}, 100, "STOP"),
        ({"max_tokens": 150, "min_tokens": 120}, 120, "STOP"),
        ({"max_tokens": 150, "ignore_eos": True}, 150, "LENGTH"),
    ],
)
async def test_length_follows_the_budget(llm: dict[str, Any], count: int, reason: str) -> None:
    sink = await _run(llm=llm)
    assert sink.end is not None
    assert len(sink.ids) == sink.end.usage.completion_tokens == count
    assert sink.end.finish_reason == frame_pb.FinishReason.Value(f"FINISH_REASON_{reason}")


async def test_stop_text_cuts_the_text_and_stop_token_ends_the_tokens() -> None:
    whole = await _run()
    words = whole.string.split()
    sink = await _run(llm={"stop": [words[10]]})
    assert sink.end is not None and sink.end.stop_reason == words[10]
    assert sink.string == " ".join(words[:10]) + " "
    sink = await _run(llm={"stop": [words[10]], "include_stop_str_in_output": True})
    assert sink.string == " ".join(words[:11])
    sink = await _run(llm={"stop_token_ids": [whole.ids[10]]})
    assert sink.ids == whole.ids[:11]


@given(cut=st.integers(1, 30), stop_at=st.one_of(st.none(), st.integers(0, 29)), held=st.integers(0, 9))
async def test_resume_completes_what_was_delivered(cut: int, stop_at: int | None, held: int) -> None:
    engine = {"tokens": 30}
    llm: dict[str, Any] = {}
    if stop_at is not None:
        llm["stop"] = [(await _run(engine=_engine(**engine))).string.split()[stop_at]]
    whole = await _run(llm=llm, engine=_engine(**engine))
    ids = whole.ids[:cut]
    delivered = whole.string[: max(0, len(content.text_of(ids)) - held)]
    rest = await _run(llm=llm, engine=_engine(**engine), resume_token_ids=ids, resume_text_chars=len(delivered))
    assert ids + rest.ids == whole.ids
    assert delivered + rest.string == whole.string
    assert rest.end is not None and whole.end is not None
    assert rest.end.usage == whole.end.usage and rest.end.finish_reason == whole.end.finish_reason


async def test_chunks_of_input_are_answered_one_after_the_other() -> None:
    sink = await _run("one", engine=_engine(tokens=2), more=["two", "three"])
    alone = [(await _run(word, engine=_engine(tokens=2))).ids for word in ("one", "two", "three")]
    assert sink.ids == [token for ids in alone for token in ids]


async def test_sound_of_several_chunks_is_continuous() -> None:
    engine = _engine(output="audio", audio_seconds=0.1, sample_rate_hz=8000)
    sink = await _run("one", engine=engine, more=["two"])
    assert [chunk.offset_samples for chunk in sink.chunks] == [0, 800]
    samples = np.frombuffer(sink.chunks[0].samples.inline.data, dtype=np.float32)
    assert samples.shape == (800,) and 0.2 < np.abs(samples).max() <= 1.0
    assert sink.end is not None and sink.end.usage.audio_seconds == pytest.approx(0.2)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
async def test_picture_has_its_size_and_format(kind: str) -> None:
    diffusion = {"width": 48, "height": 32, "num_inference_steps": 3, "output_format": kind}
    sink = await _run(engine=_engine(output="image"), diffusion=diffusion)
    assert sink.steps == [1, 2, 3]
    with Image.open(io.BytesIO(sink.files[0].data)) as picture:
        assert picture.size == (48, 32) and picture.format == kind.upper()


async def test_several_pictures_differ() -> None:
    sink = await _run(engine=_engine(output="image"), diffusion={"num_images_per_prompt": 2})
    assert [file.index for file in sink.files] == [0, 1] and sink.files[0].data != sink.files[1].data


async def test_tensor_belongs_to_its_prompt() -> None:
    made = [(await _run(prompt, engine=_engine(output="tensor"))).arrays["hidden_states"] for prompt in "aab"]
    assert made[0].dtype == np.float32 and np.array_equal(made[0], made[1]) and not np.array_equal(made[0], made[2])


@pytest.mark.parametrize(
    ("llm", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"n": 2}, "n"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
async def test_bad_value_names_its_field(llm: dict[str, Any], field: str) -> None:
    with pytest.raises(MeshError) as caught:
        await _run(llm=llm)
    assert caught.value.reason == Reason.INVALID_REQUEST and caught.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokns": 3}, "did you mean tokens"),
        ({"tokens": "many"}, "whole number"),
        ({"tokens": 0}, "1 or more"),
        ({"tokens": True}, "whole number"),
        ({"tokens_per_second": -1}, "0 or more"),
        ({"output": "smell"}, "text, image, audio, tensor"),
        ({"image_size": 5000}, "4096 or less"),
        ({"tensor_shape": [1, "x"]}, "whole numbers"),
    ],
)
def test_bad_option_says_what_would_be_right(options: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineConfigError, match=words):
        SyntheticEngine.check(Stage.model_validate({"name": "s", "engine": "synthetic", "engine_args": options}))

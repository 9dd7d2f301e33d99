"""From people's arguments to messages: prompts, sampling parameters; from errors to classes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagemesh import Diffusion, InvalidRequest, Llm, MediaInput, Reason, StageMeshError
from stagemesh.client.decode import decode
from stagemesh.client.errors import CLASS_OF, typed
from stagemesh.client.prompts import to_prompt
from stagemesh.client.sampling import to_sampling
from stagemesh.rpc.errors import MeshError
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb


def one(params: Any, stage_type: str | None = None) -> sampling_pb.SamplingParams:
    (row,) = to_sampling({"stage": params}, lambda name, position: stage_type)
    return row.params


@pytest.mark.parametrize(
    ("kind", "message"), [(Llm, sampling_pb.LlmSamplingParams), (Diffusion, sampling_pb.DiffusionSamplingParams)]
)
def test_typed_parameters_are_those_of_the_contract(kind: type, message: Any) -> None:
    assert [field.name for field in fields(kind)] == [field.name for field in message.DESCRIPTOR.fields]


def test_llm_parameters_of_every_shape_arrive() -> None:
    llm = one(
        Llm(
            temperature=0.5,
            stop=["."],
            logit_bias={7: -1.5},
            structured_outputs={"choice": ["a", "b"], "disable_any_whitespace": True},
            extra={"guided": {"x": [1, 2]}},
        )
    ).llm
    assert llm.temperature == 0.5 and list(llm.stop) == ["."] and dict(llm.logit_bias) == {7: -1.5}
    assert list(llm.structured_outputs.choice.choices) == ["a", "b"] and llm.structured_outputs.disable_any_whitespace
    assert llm.extra["guided"]["x"][1] == 2
    assert not llm.HasField("max_tokens")


def test_a_json_schema_may_be_a_mapping() -> None:
    schema = one({"structured_outputs": {"json_schema": {"type": "object"}}}).llm.structured_outputs.json_schema
    assert schema == '{"type": "object"}'


def test_zero_is_sent_and_not_taken_for_unset() -> None:
    assert one({"num_inference_steps": 0}).diffusion.HasField("num_inference_steps")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temprature": 1}, "sampling[stage].temprature: 1: unknown parameter; did you mean temperature?"),
        ({"zzz": 1}, "sampling[stage].zzz: 1: unknown parameter; what only the engine knows goes into `extra`"),
        ({"temperature": 1, "height": 8}, "mixes parameters of llm stages with those of diffusion stages"),
        ({"max_tokens": -1}, "sampling[stage].max_tokens: -1: want a whole number of at least 0"),
        ({"max_tokens": "many"}, "sampling[stage].max_tokens: 'many': want a whole number"),
        ({"temperature": "hot"}, "sampling[stage].temperature: 'hot': want a number"),
        ({"stop": "."}, "sampling[stage].stop: '.': want a list, each a text"),
        ({"logit_bias": {"x": 1}}, "sampling[stage].logit_bias: {'x': 1}: want a mapping"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "want exactly one of json_schema"),
        (3, "sampling[stage]: 3: want stagemesh.Llm(...)"),
    ],
)
def test_wrong_parameters_are_named(params: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        one(params)
    assert words in str(caught.value)


def test_parameters_in_the_order_of_the_stages_have_no_names() -> None:
    rows = to_sampling([{"temperature": 0}, Diffusion(seed=1)], lambda name, position: None)
    assert [(row.stage, row.params.WhichOneof("params")) for row in rows] == [("", "llm"), ("", "diffusion")]


def test_prompts_of_every_form() -> None:
    assert to_prompt("a wish", negative="blur").negative_text == "blur"
    assert list(to_prompt([1, 2, 3]).tokens.ids) == list(to_prompt(np.array([1, 2, 3])).tokens.ids) == [1, 2, 3]
    chat = to_prompt([{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]).chat
    assert [(message.role, message.content) for message in chat.messages] == [("system", "short"), ("user", "hi")]
    embeds = to_prompt(np.arange(6, dtype=">f4").reshape(2, 3)).embeds.inline
    assert (embeds.dtype, list(embeds.shape)) == ("float32", [2, 3])
    assert np.frombuffer(embeds.data, "<f4").tolist() == [0, 1, 2, 3, 4, 5]


def test_media_goes_by_bytes_or_url(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    by_path, by_url = to_prompt("x", media=[MediaInput(tmp_path / "a.png"), MediaInput("https://h/b.wav")]).media
    assert (by_path.data, by_path.modality, by_path.mime_type) == (b"png", "image", "image/png")
    assert (by_url.url, by_url.modality) == ("https://h/b.wav", "audio")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": []}, "prompt: []: is empty"),
        ({"prompt": [-1]}, "prompt[0]: -1: token ids are at least 0"),
        ({"prompt": [{"role": "robot", "content": "x"}]}, "prompt[0].role: 'robot': want one of system"),
        ({"prompt": [{"role": "user"}]}, "prompt[0]: {'role': 'user'}: want {'role': ..., 'content'"),
        ({"prompt": [1, "a"]}, "want a text, chat messages"),
        ({"prompt": b"x"}, "want a text, chat messages"),
        ({"prompt": "x", "media": [MediaInput("/no/such.png")]}, "media[0]: '/no/such.png': cannot be read"),
        ({"prompt": "x", "media": [MediaInput(b"x")]}, "media[0].modality: '': want image, audio or video"),
    ],
)
def test_wrong_prompts_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_prompt(**arguments)
    assert words in str(caught.value)


def test_every_reason_has_a_class() -> None:
    assert set(CLASS_OF) == set(Reason)
    for reason in Reason:
        error = typed(MeshError.from_status(MeshError(reason, field="f").to_status()))
        assert type(error) is CLASS_OF[reason] and error.reason is reason and error.metadata == {"field": "f"}
        assert isinstance(error, StageMeshError)


def test_tensors_are_views_of_the_bytes_that_came() -> None:
    inline = tensor_pb.Tensor(dtype="bfloat16", shape=[1, 2], data=b"\x80\x3f\x00\x40")
    output = frame_pb.TensorOutput(name="latent", value=tensor_pb.TensorValue(inline=inline))
    frame: Any = decode(inference_pb.GenerateResponse(frame=frame_pb.Frame(stage="vae", tensor=output)))
    assert (frame.name, frame.dtype, frame.array.dtype, frame.array.tolist()) == (
        "latent", "bfloat16", np.dtype("uint16"), [[0x3F80, 0x4000]],
    )  # fmt: skip


def test_words_of_a_newer_head_are_shown_as_numbers() -> None:
    finished = inference_pb.RequestFinished(finish_reason=99)  # type: ignore[arg-type]
    frame: Any = decode(inference_pb.GenerateResponse(finished=finished))
    assert frame.finish_reason == "unknown (99)"


def test_media_saves_itself_and_makes_folders(tmp_path: Path) -> None:
    media = frame_pb.MediaOutput(modality=frame_pb.MODALITY_IMAGE, mime_type="image/jpeg", data=b"jpeg")
    frame: Any = decode(inference_pb.GenerateResponse(frame=frame_pb.Frame(media=media)))
    path = frame.save(tmp_path / "new" / f"a{frame.suffix}")
    assert path.name == "a.jpg" and path.read_bytes() == b"jpeg"
    assert frame.seed is None

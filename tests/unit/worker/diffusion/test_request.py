"""Requests are checked whole before anything is queued, and a refusal names the field."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh_worker.engines.base import EngineInput
from stagemesh_worker.engines.diffusion.facts import PipelineFacts
from stagemesh_worker.engines.diffusion.options import DiffusionOptions
from stagemesh_worker.engines.diffusion.request import DiffusionRequest, build_request

FACTS = PipelineFacts(
    class_name="StableDiffusionPipeline",
    version="0",
    arguments={
        "prompt": "any", "negative_prompt": "any", "height": "int", "width": "int", "num_inference_steps": "int",
        "timesteps": "any", "guidance_scale": "float", "num_images_per_prompt": "int", "eta": "float",
        "generator": "any", "latents": "any", "prompt_embeds": "any", "output_type": "str", "clip_skip": "int",
        "guidance_rescale": "float", "cross_attention_kwargs": "any", "callback_on_step_end": "any",
    },
    native_height=64,
    native_width=64,
    previews=True,
    lora=True,
)  # fmt: skip
IMAGE_TO_IMAGE = PipelineFacts(
    class_name="StableDiffusionInpaintPipeline",
    version="0",
    arguments={**FACTS.arguments, "image": "any", "mask_image": "any", "strength": "float"},
)
AUDIO = PipelineFacts(
    class_name="AudioPipeline",
    version="0",
    arguments={"prompt": "any", "audio_end_in_s": "float", "num_waveforms_per_prompt": "int"},
    modality="audio",
    sample_rate_hz=16000,
)
TEXT = EngineInput(text="a red circle")
OPTIONS = DiffusionOptions()


def params(**values: Any) -> sampling_pb.DiffusionSamplingParams:
    extra = values.pop("extra", {})
    made = sampling_pb.DiffusionSamplingParams(**values)
    made.extra.update(extra)
    return made


def build(facts: PipelineFacts = FACTS, options: DiffusionOptions = OPTIONS, **values: Any) -> DiffusionRequest:
    return build_request(TEXT, params(**values), facts, options)


def refusal(given: EngineInput = TEXT, facts: PipelineFacts = FACTS, **values: Any) -> MeshError:
    with pytest.raises(MeshError) as caught:
        build_request(given, params(**values), facts, OPTIONS)
    return caught.value


def test_typed_and_extra_parameters_become_arguments_of_the_call() -> None:
    request = build(
        num_inference_steps=20, guidance_scale=2.1, height=32, width=48, negative_prompt="blurry",
        extra={"clip_skip": 1, "cross_attention_kwargs": {"scale": 0.5}},
    )  # fmt: skip
    assert request.call == {
        "num_inference_steps": 20, "guidance_scale": 2.1, "height": 32, "width": 48, "clip_skip": 1,
        "cross_attention_kwargs": {"scale": 0.5},
    }  # fmt: skip
    assert isinstance(request.call["clip_skip"], int)
    assert (request.prompt, request.negative_prompt, request.output_format) == ("a red circle", "blurry", "png")


def test_the_stages_call_arguments_lie_below_those_of_the_request() -> None:
    options = DiffusionOptions(diffusers_call_kwargs={"guidance_scale": 7.0, "eta": 0.5})
    assert build(options=options, guidance_scale=2.0).call == {"guidance_scale": 2.0, "eta": 0.5}


def test_one_side_alone_is_completed_by_the_models_own() -> None:
    assert build(height=32).call == {"height": 32, "width": 64}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 1001}, "num_inference_steps"),
        ({"guidance_scale": -1.0}, "guidance_scale"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"guidance_scale": float("inf")}, "guidance_scale"),
        ({"height": 0}, "height"),
        ({"width": 100_000}, "width"),
        ({"height": 4_000_000_000, "width": 64}, "height"),
        ({"eta": 1.5}, "eta"),
        ({"guidance_rescale": -0.1}, "guidance_rescale"),
        ({"strength": 0.5}, "strength"),  # this pipeline has none
        ({"num_frames": 8}, "num_frames"),
        ({"audio_seconds": 1.0}, "audio_seconds"),
        ({"num_images_per_prompt": 0}, "num_images_per_prompt"),
        ({"num_images_per_prompt": 17}, "num_images_per_prompt"),
        ({"output_format": "bmp"}, "output_format"),
        ({"output_format": "wav"}, "output_format"),
        ({"timesteps": [1.0, 500.0]}, "timesteps"),
        ({"timesteps": [500.0, -1.0]}, "timesteps"),
        ({"timesteps": [500.0], "num_inference_steps": 1}, "timesteps"),
        ({"extra": {"clip_skp": 1}}, "extra.clip_skp"),
        ({"extra": {"clip_skip": 1.5}}, "extra.clip_skip"),
        ({"extra": {"clip_skip": "1"}}, "extra.clip_skip"),
        ({"extra": {"eta": True}}, "extra.eta"),
        ({"extra": {"generator": 1}}, "extra.generator"),
        ({"extra": {"callback_on_step_end": "os.system"}}, "extra.callback_on_step_end"),
        ({"extra": {"output_type": "latent"}}, "extra.output_type"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(values: dict[str, Any], field: str) -> None:
    error = refusal(**values)
    assert error.reason is Reason.INVALID_REQUEST
    assert error.metadata["field"] == field
    assert error.message.startswith(field)


def test_an_unknown_argument_gets_a_suggestion() -> None:
    assert "did you mean clip_skip?" in refusal(extra={"clip_skp": 1}).message


def test_timesteps_replace_the_stages_own_number_of_steps() -> None:
    options = DiffusionOptions(diffusers_call_kwargs={"num_inference_steps": 20})
    assert build(options=options, timesteps=[900.0, 500.0, 10.0]).call == {"timesteps": [900, 500, 10]}


def test_each_picture_has_a_seed_of_its_own_that_can_be_asked_for_again() -> None:
    several = build(seed=41, num_images_per_prompt=3)
    assert several.seeds == (41, 42, 43)
    assert build(seed=42).seeds == (42,)
    assert build(seed=(1 << 63) - 1, num_images_per_prompt=2).seeds == ((1 << 63) - 1, -(1 << 63))


def test_without_a_seed_each_request_gets_another() -> None:
    assert build().seeds != build().seeds


def test_audio_takes_its_length_under_the_pipelines_own_name() -> None:
    request = build(AUDIO, audio_seconds=2.5, num_images_per_prompt=2)
    assert request.call == {"audio_end_in_s": 2.5}
    assert (len(request.seeds), request.output_format) == (2, "wav")


def test_previews_of_a_pipeline_that_has_none_are_unsupported() -> None:
    assert refusal(facts=AUDIO, preview_interval_steps=2).reason is Reason.UNSUPPORTED


# ------------------------------------------------------------------ who may share a call
def test_requests_that_differ_in_text_and_seed_only_share_a_call() -> None:
    one = build_request(EngineInput(text="a"), params(seed=1, num_inference_steps=5), FACTS, OPTIONS)
    other = build_request(EngineInput(text="b"), params(seed=2, num_inference_steps=5), FACTS, OPTIONS)
    assert one.batch_key == other.batch_key is not None


@pytest.mark.parametrize(
    "values",
    [
        {"num_inference_steps": 6},
        {"guidance_scale": 3.0},
        {"height": 32},
        {"num_images_per_prompt": 2},
        {"negative_prompt": "blurry"},
        {"extra": {"clip_skip": 1}},
    ],
)
def test_requests_that_differ_in_more_do_not(values: dict[str, Any]) -> None:
    assert build(num_inference_steps=5).batch_key != build(**{"num_inference_steps": 5, **values}).batch_key


def test_adapters_are_not_mixed_in_a_call() -> None:
    keys = {
        build_request(TEXT, params(), FACTS, OPTIONS, lora=lora).batch_key
        for lora in (None, ("ink", 1.0), ("ink", 0.5), ("oil", 1.0))
    }
    assert len(keys) == 4


# ------------------------------------------------------------------ input
def test_embeddings_take_the_place_of_the_prompt_and_run_alone() -> None:
    embeds = np.ones((16, 32), np.float32)
    request = build_request(EngineInput(embeds=embeds), params(), FACTS, OPTIONS)
    assert request.prompt is None
    assert request.arrays["prompt_embeds"].shape == (1, 16, 32)
    assert request.batch_key is None


def test_a_picture_is_decoded_for_pipelines_that_take_one() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 4), "red").save(buffer, "png")
    media = prompt_pb.MediaInput(modality="image", data=buffer.getvalue())
    given = EngineInput(text="a", media=(media,))
    request = build_request(given, params(strength=0.5), IMAGE_TO_IMAGE, OPTIONS)
    assert request.arrays["image"].shape == (4, 8, 3)
    assert request.arrays["image"][0, 0].tolist() == [255, 0, 0]
    assert "takes no image" in refusal(given).message


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (EngineInput(), "needs a text"),
        (EngineInput(token_ids=(1, 2)), "reads text or embeddings"),
        (EngineInput(text="a", tensors={"hidden": np.ones(3)}), r"tensors\.hidden"),
        (
            EngineInput(text="a", media=(prompt_pb.MediaInput(modality="image", data=b"not a picture"),)),
            r"prompt\.media\[0\]: .*not a picture that can be read",
        ),
        (
            EngineInput(text="a", media=(prompt_pb.MediaInput(modality="image", url="file:///etc/passwd"),)),
            "give the picture's bytes",
        ),
        (EngineInput(text="a", media=(prompt_pb.MediaInput(modality="audio", data=b"x"),)), "reads images"),
    ],
)
def test_input_that_cannot_be_used_is_refused(given: EngineInput, says: str) -> None:
    with pytest.raises(MeshError, match=says):
        build_request(given, params(), IMAGE_TO_IMAGE, OPTIONS)


@given(
    st.builds(
        sampling_pb.DiffusionSamplingParams,
        num_inference_steps=st.none() | st.integers(0, (1 << 32) - 1),
        guidance_scale=st.none() | st.floats(width=32),
        height=st.none() | st.integers(0, (1 << 32) - 1),
        width=st.none() | st.integers(0, (1 << 32) - 1),
        seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
        num_images_per_prompt=st.none() | st.integers(0, 40),
        output_format=st.none() | st.text(max_size=4),
        timesteps=st.lists(st.floats(width=32), max_size=3),
        eta=st.none() | st.floats(width=32),
    )
)
def test_whatever_is_asked_is_built_within_bounds_or_refused(asked: sampling_pb.DiffusionSamplingParams) -> None:
    try:
        request = build_request(TEXT, asked, FACTS, OPTIONS)
    except MeshError as error:
        assert error.reason is Reason.INVALID_REQUEST
        assert error.metadata["field"]
    else:
        assert 1 <= len(request.seeds) <= OPTIONS.max_images_per_prompt
        assert 1 <= request.call.get("num_inference_steps", 1) <= OPTIONS.max_num_inference_steps
        assert request.call.get("height", 64) * request.call.get("width", 64) <= 4 * 64 * 64
        assert all(-(1 << 63) <= seed < 1 << 63 for seed in request.seeds)

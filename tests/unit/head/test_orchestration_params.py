"""Sampling parameters and what they mean for recovery, without a mesh."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.config import Pipeline, Stage
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh_head.orchestration import params as stage_params
from stagemesh_head.orchestration.recovery import ResumeMode, resume_mode


def stage(stage_type: str = "llm", **defaults: Any) -> Stage:
    return Stage.model_validate(
        {"name": "s", "stage_type": stage_type, "engine": "synthetic", "default_sampling_params": defaults}
    )


def llm(**fields: Any) -> sampling_pb.SamplingParams:
    return sampling_pb.SamplingParams(llm=sampling_pb.LlmSamplingParams(**fields))


def diffusion(**fields: Any) -> sampling_pb.SamplingParams:
    return sampling_pb.SamplingParams(diffusion=sampling_pb.DiffusionSamplingParams(**fields))


def merged(given_params: sampling_pb.SamplingParams, **defaults: Any) -> sampling_pb.LlmSamplingParams:
    one = stage(**defaults)
    return stage_params.merge(one, stage_params.defaults_of(one), ("sampling[s]", given_params)).llm


def test_defaults_take_the_spellings_of_pipeline_files() -> None:
    params = stage_params.defaults_of(
        stage(
            stop="end", structured_outputs={"json": {"type": "object"}}, seed=7, temperature=None, repetition_window=9
        )
    ).llm
    assert list(params.stop) == ["end"]
    assert params.structured_outputs.json_schema == '{"type": "object"}'
    assert params.seed == 7
    assert not params.HasField("temperature")
    assert params.extra.fields["repetition_window"].number_value == 9


@pytest.mark.parametrize(
    ("defaults", "text"),
    [
        ({"temperature": -1}, "stage 's': default_sampling_params.temperature: -1.0: must be >= 0"),
        ({"max_tokens": "many"}, "stage 's': default_sampling_params: "),
        ({"stop": [""]}, "stage 's': default_sampling_params.stop"),
    ],
)
def test_wrong_defaults_are_found_when_the_head_starts(defaults: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="default_sampling_params") as caught:
        stage_params.defaults_of(stage(**defaults))
    assert str(caught.value).startswith(text)


def test_a_given_field_replaces_the_default_and_leaves_the_others() -> None:
    params = merged(llm(temperature=0.0, stop=["b"]), temperature=0.7, stop=["a", "x"], max_tokens=5)
    assert (params.temperature, list(params.stop), params.max_tokens) == (0.0, ["b"], 5)


def test_a_given_map_or_message_replaces_the_default_whole() -> None:
    params = merged(
        llm(logit_bias={2: 1.0}, structured_outputs=sampling_pb.StructuredOutputs(regex="a+")),
        logit_bias={1: 5.0},
        structured_outputs={"json": {}, "disable_any_whitespace": True},
    )
    assert dict(params.logit_bias) == {2: 1.0}
    assert params.structured_outputs == sampling_pb.StructuredOutputs(regex="a+")


def test_extra_fields_are_merged_by_name() -> None:
    given_params = llm()
    given_params.llm.extra.update({"b": 2})
    params = merged(given_params, extra={"a": 1, "b": 1})
    assert {name: value.number_value for name, value in params.extra.fields.items()} == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (llm(n=0), "sampling[s].n: 0: must be from 1 to 128"),
        (llm(temperature=-0.1), "sampling[s].temperature: -0.1: must be >= 0"),
        (llm(temperature=math.inf), "sampling[s].temperature: inf: must be >= 0"),
        (llm(temperature=math.nan), "sampling[s].temperature: nan: must be >= 0"),
        (llm(top_p=1.5), "sampling[s].top_p: 1.5: must be above 0 and at most 1"),
        (llm(top_k=-2), "sampling[s].top_k: -2: must be >= 1, or 0 or -1 for all"),
        (llm(min_tokens=5, max_tokens=4), "sampling[s].min_tokens: 5: must be at most max_tokens, 4"),
        (llm(repetition_penalty=0), "sampling[s].repetition_penalty: 0.0: must be above 0"),
        (llm(logit_bias={1: math.nan}), "sampling[s].logit_bias"),
        (llm(structured_outputs=sampling_pb.StructuredOutputs()), "sampling[s].structured_outputs: ''"),
        (
            llm(structured_outputs=sampling_pb.StructuredOutputs(json_schema="{")),
            "sampling[s].structured_outputs.json_s",
        ),
        (
            llm(structured_outputs=sampling_pb.StructuredOutputs(json_object=False)),
            "sampling[s].structured_outputs.json",
        ),
        (
            llm(structured_outputs=sampling_pb.StructuredOutputs(choice=sampling_pb.ChoiceList())),
            "sampling[s].structured_outputs.choice: []: give at least one text",
        ),
    ],
)
def test_llm_parameters_out_of_range_name_the_field(params: sampling_pb.SamplingParams, text: str) -> None:
    with pytest.raises(MeshError) as caught:
        merged(params)
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert caught.value.message.startswith(text)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (diffusion(num_inference_steps=0), "num_inference_steps"),
        (diffusion(height=0), "height"),
        (diffusion(guidance_scale=-1), "guidance_scale"),
        (diffusion(num_images_per_prompt=0), "num_images_per_prompt"),
        (diffusion(output_format="gif"), "output_format"),
        (diffusion(strength=1.5), "strength"),
    ],
)
def test_diffusion_parameters_out_of_range_name_the_field(params: sampling_pb.SamplingParams, field: str) -> None:
    one = stage("diffusion")
    with pytest.raises(MeshError, match=rf"sampling\[s\]\.{field}: "):
        stage_params.merge(one, stage_params.defaults_of(one), ("sampling[s]", params))


@given(st.floats(allow_nan=True, allow_infinity=True, width=32))
def test_any_temperature_is_taken_or_refused_with_the_field_named(value: float) -> None:
    try:
        taken = merged(llm(temperature=value)).temperature
    except MeshError as error:
        assert not 0 <= value < math.inf
        assert error.metadata["field"] == "sampling[s].temperature"
    else:
        assert taken == value


def test_positions_and_names_may_not_meet() -> None:
    pipeline = Pipeline.model_validate(
        {"name": "p", "stages": [{"name": name, "engine": "synthetic"} for name in ("a", "b")]}
    )
    sets = [inference_pb.StageSampling(params=llm(n=1)), inference_pb.StageSampling(stage="a", params=llm(n=1))]
    with pytest.raises(MeshError, match=r"sampling\[1\]\.stage: 'a': has parameters already"):
        stage_params.match(pipeline, sets)


def test_a_seed_is_made_only_where_a_picture_needs_one() -> None:
    text, picture, chosen = llm(), diffusion(), diffusion(seed=0)
    for params in (text, picture, chosen):
        stage_params.fix_seed(params)
    assert not text.llm.HasField("seed")
    assert picture.diffusion.HasField("seed")
    assert chosen.diffusion.seed == 0


@pytest.mark.parametrize(
    ("params", "mode"),
    [
        (llm(temperature=0), ResumeMode.EXACT),
        (llm(temperature=0, repetition_penalty=1.2), ResumeMode.EXACT),
        (llm(temperature=0, logprobs=3), ResumeMode.EXACT),
        (llm(temperature=0, stop=["x"]), ResumeMode.EXACT),
        (llm(), ResumeMode.CONTINUED),
        (llm(temperature=0.5), ResumeMode.CONTINUED),
        (llm(temperature=0.5, seed=1), ResumeMode.CONTINUED),
        (llm(temperature=0, frequency_penalty=0.1), ResumeMode.RESTARTED),
        (llm(temperature=0, presence_penalty=0.1), ResumeMode.RESTARTED),
        (llm(temperature=0, presence_penalty=0.0), ResumeMode.EXACT),
        (llm(temperature=0, n=2), ResumeMode.RESTARTED),
        (llm(temperature=0, truncate_prompt_tokens=9), ResumeMode.RESTARTED),
        (llm(temperature=0, structured_outputs=sampling_pb.StructuredOutputs(regex="a")), ResumeMode.RESTARTED),
        (diffusion(), ResumeMode.RESTARTED),
    ],
)
def test_resume_mode_follows_the_table(params: sampling_pb.SamplingParams, mode: ResumeMode) -> None:
    assert resume_mode(params) is mode


def test_parameters_of_the_wrong_kind_say_what_was_given_and_what_the_stage_takes() -> None:
    with pytest.raises(MeshError) as caught:
        stage_params.merge(stage("diffusion"), stage_params.defaults_of(stage("diffusion")), ("sampling[s]", llm()))
    assert caught.value.metadata["field"] == "sampling[s].llm"
    assert str(caught.value) == "sampling[s].llm: stage 's' is of type diffusion and takes `diffusion` parameters"

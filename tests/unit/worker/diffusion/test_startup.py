"""What every request of a stage would meet is checked once, at its start."""

from __future__ import annotations

from typing import Any

import pytest

from stagemesh.config import Stage
from stagemesh_worker.engines.base import EngineConfigError
from stagemesh_worker.engines.diffusion.facts import PipelineFacts
from stagemesh_worker.engines.diffusion.startup import check_defaults, parse_stage

FACTS = PipelineFacts(
    class_name="StableDiffusionPipeline",
    version="0",
    arguments={"prompt": "any", "num_inference_steps": "int", "guidance_scale": "float", "clip_skip": "int"},
)


def stage(**changes: Any) -> Stage:
    return Stage(**{"stage_id": 1, "name": "painter", "stage_type": "diffusion", "model": "painter", **changes})


def check(**changes: Any) -> None:
    painter = stage(**changes)
    check_defaults(painter, FACTS, parse_stage(painter))


def test_a_stage_that_fits_passes() -> None:
    check(
        engine_args={"diffusers_call_kwargs": {"clip_skip": 1}},
        default_sampling_params={"num_inference_steps": 20, "guidance_scale": 2.0, "extra": {"clip_skip": 2}},
    )


def test_the_batch_size_of_the_runtime_section_counts_unless_the_engine_says_another() -> None:
    assert parse_stage(stage(runtime={"max_batch_size": 4})).max_num_seqs == 4
    assert parse_stage(stage(runtime={"max_batch_size": 4}, engine_args={"max_num_seqs": 2})).max_num_seqs == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"default_sampling_params": {"num_inference_steps": 0}},
            r"default_sampling_params\.num_inference_steps: 0: must be at least 1",
        ),
        (
            {"default_sampling_params": {"num_inference_steps": "many"}},
            r"default_sampling_params\.num_inference_steps: 'many': ",
        ),
        (
            {"default_sampling_params": {"num_frames": 8}},
            r"default_sampling_params\.num_frames: 8: StableDiffusionPipeline takes no num_frames",
        ),
        (
            {"default_sampling_params": {"clip_skp": 8}},
            r"default_sampling_params\.extra\.clip_skp: .*did you mean clip_skip",
        ),
        (
            {"engine_args": {"diffusers_call_kwargs": {"clip_skp": 1}}},
            r"engine_args\.diffusers_call_kwargs\.clip_skp: 1: .*did you mean clip_skip",
        ),
        (
            {"engine_args": {"diffusers_call_kwargs": {"generator": 1}}},
            "generator: 1: the engine sets this argument itself",
        ),
        ({"engine_args": {"max_num_seq": 1}}, r"engine_args\.max_num_seq: .*did you mean max_num_seqs"),
    ],
)
def test_what_no_request_could_run_with_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineConfigError, match=says):
        check(**changes)

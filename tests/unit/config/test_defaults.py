"""Pipelines without a file (C7)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagemesh.config import ConfigError, Stage, default_pipeline
from stagemesh.config.layout import devices_per_replica


@pytest.fixture
def diffusers(tmp_path: Path) -> Path:
    folder = tmp_path / "Some_Model v1.5"
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    return folder


@pytest.fixture
def llm(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-llm"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def one(model: Path, **options: Any) -> Stage:
    (stage,) = default_pipeline(model, **options).stages
    return stage


def test_diffusion_stage(diffusers: Path) -> None:
    pipeline = default_pipeline(diffusers)
    (stage,) = pipeline.stages
    assert pipeline.name == "some-model-v1-5"
    assert (stage.stage_type, stage.engine, stage.final_output_type, stage.final_output) == (
        "diffusion", "diffusion", "image", True,
    )  # fmt: skip
    assert stage.model == str(diffusers)
    assert stage.engine_args == {"max_num_seqs": 1, "dtype": "auto"}
    assert devices_per_replica(stage) == 1


def test_arguments_of_the_command_line_are_the_stages_own(diffusers: Path) -> None:
    stage = one(diffusers, engine_args={"max_num_seqs": 4, "static_lora_scale": 0.5, "dtype": "float32"})
    assert stage.engine_args == {"max_num_seqs": 4, "lora_scale": 0.5, "dtype": "float32"}


def test_sequence_parallelism_is_ulysses_times_ring(diffusers: Path) -> None:
    stage = one(diffusers, engine_args={"ulysses_degree": 2, "ring_degree": 3, "cfg_parallel_size": 2})
    assert stage.engine_args["parallel_config"] == {
        "ulysses_degree": 2, "ring_degree": 3, "cfg_parallel_size": 2, "sequence_parallel_size": 6,
    }  # fmt: skip
    assert devices_per_replica(stage) == 12


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        (
            "cache_dit",
            {"Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 4, "residual_diff_threshold": 0.24,
             "max_continuous_cached_steps": 3},
        ),
        ("tea_cache", {"rel_l1_thresh": 0.2}),
        ("mag_cache", {"threshold": 0.24, "max_skip_steps": 5, "retention_ratio": 0.1}),
        ("first_block_cache", None),
    ],
)  # fmt: skip
def test_cache_backends_have_defaults(backend: str, config: dict[str, Any] | None, diffusers: Path) -> None:
    assert one(diffusers, engine_args={"cache_backend": backend}).engine_args.get("cache_config") == config
    given = one(diffusers, engine_args={"cache_backend": backend, "cache_config": {"threshold": 1}})
    assert given.engine_args["cache_config"] == {"threshold": 1}


@pytest.mark.parametrize(
    ("kind", "output"),
    [("StableAudioPipeline", "audio"), ("AudioLDM2Pipeline", "audio"), ("MusicLDMPipeline", "audio"),
     ("CogVideoXPipeline", "video"), ("WanPipeline", "video"), ("LTXPipeline", "video"), ("MochiPipeline", "video"),
     ("FluxPipeline", "image"), ("KandinskyV22Pipeline", "image"), ("QwenImagePipeline", "image"), ("", "image")],
)  # fmt: skip
def test_output_is_what_the_pipeline_makes(kind: str, output: str, diffusers: Path) -> None:
    (diffusers / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    assert one(diffusers).final_output_type == output


def test_broken_model_index(diffusers: Path) -> None:
    (diffusers / "model_index.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model_index.json: cannot be read: Expecting property name"):
        default_pipeline(diffusers)


def test_llm_stage(llm: Path) -> None:
    stage = one(llm, engine_args={"max_model_len": 512})
    assert (stage.engine, stage.final_output_type, stage.input_adapter) == ("vllm", "text", None)
    assert stage.engine_args == {"max_model_len": 512}


def test_model_with_a_chat_template_is_spoken_to_through_it(llm: Path) -> None:
    (llm / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert one(llm).input_adapter == "chat"
    (llm / "tokenizer_config.json").write_text("{}")
    assert one(llm).input_adapter is None
    (llm / "chat_template.jinja").write_text("x")
    assert one(llm).input_adapter == "chat"


@pytest.mark.parametrize("key", ["0", "llm"])
def test_default_sampling_parameters_by_id_or_name(key: str, llm: Path) -> None:
    assert one(llm, default_sampling_params={key: {"max_tokens": 5}}).default_sampling_params == {"max_tokens": 5}


def test_default_sampling_parameters_of_another_stage(llm: Path) -> None:
    with pytest.raises(ConfigError, match=r"--default-sampling-params: '1': there is no such stage; .* 0 \(llm\)"):
        default_pipeline(llm, default_sampling_params={"1": {}})


def test_overrides_and_overlays_lie_over_it(llm: Path, write) -> None:
    over = write("stages: [{stage_id: 0, max_num_seqs: 2}]\n", "over.yaml")
    stage = one(llm, overlays=[over], stage_overrides={"0": {"num_replicas": 3}}, policy="random")
    assert (stage.engine_args["max_num_seqs"], stage.runtime.num_replicas) == (2, 3)


def test_name_of_the_hub_is_looked_up_in_this_machines_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--Tiny-LLM/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--Tiny-LLM/refs").mkdir()
    (tmp_path / "models--org--Tiny-LLM/refs/main").write_text("abc\n")
    pipeline = default_pipeline("org/Tiny-LLM")
    assert (pipeline.name, pipeline.stages[0].model) == ("tiny-llm", str(snapshot))
    with pytest.raises(ConfigError, match=r"--model: 'org/other': there is no such folder; .*hf download NAME"):
        default_pipeline("org/other")

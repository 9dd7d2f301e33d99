"""Who wins (C4), what is left out (C5) and what only fills (C6): a row a rule."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from stagemesh.config import load
from stagemesh.config.overrides import ALWAYS_KEPT, VLLM_DEFAULTS, parse_engine_args

FILE = """
stages:
- name: llm
  model: m
  engine_args: {file_only: file, file_overlay: file, file_arg: file, file_override: file, max_loras: 4, \
                tensor_parallel_size: 2, enable_sleep_mode: false}
- name: picture
  stage_type: diffusion
  model: m
  engine_args: {lora_scale: 0.5, quantization: file}
"""
OVERLAY = """
stages:
- {stage_id: 0, file_overlay: overlay, overlay_only: overlay, overlay_arg: overlay, overlay_override: overlay, \
   enable_lora: true}
platforms:
  cuda:
    stages:
    - {stage_id: 0, overlay_only: cuda}
"""
ARGS = {
    "file_arg": "arg", "overlay_arg": "arg", "arg_only": "arg", "arg_override": "arg", "tensor_parallel_size": 4,
    "gpu_memory_utilization": 0.92, "enforce_eager": True, "enable_sleep_mode": True, "lora_path": "l",
    "lora_scale": 0.9, "quantization": "arg", "enable_lora": False, "max_loras": 1,
    **parse_engine_args(["--diffusion-attention-backend=native"]),
}  # fmt: skip
OVERRIDES = {"llm": {"file_override": "override", "overlay_override": "override", "arg_override": "override",
                     "engine_args": {"nested": "override"}}}  # fmt: skip

RULES: list[tuple[str, str, str, Any, str]] = [
    # rule, stage, engine argument, value, origin
    ("the file's own value", "llm", "file_only", "file", "pipeline.yaml:5"),
    ("an overlay wins over the file", "llm", "file_overlay", "overlay", "over.yaml:3"),
    ("a platform section wins over the common part", "llm", "overlay_only", "cuda", "over.yaml:7"),
    ("an argument for all stages does not win over a file's value", "llm", "file_arg", "file", "pipeline.yaml:5"),
    ("but it wins over an overlay's", "llm", "overlay_arg", "arg", "--engine-arg"),
    ("also when it equals vLLM's default", "llm", "enable_lora", False, "--engine-arg"),
    ("an argument reaches stages that say nothing", "llm", "arg_only", "arg", "--engine-arg"),
    ("of every kind", "picture", "arg_only", "arg", "--engine-arg"),
    ("an override wins over the file", "llm", "file_override", "override", "--stage-overrides"),
    ("over an overlay", "llm", "overlay_override", "override", "--stage-overrides"),
    ("over an argument", "llm", "arg_override", "override", "--stage-overrides"),
    ("an override may nest", "llm", "nested", "override", "--stage-overrides"),
    ("an override is for its stage only", "picture", "arg_override", "arg", "--engine-arg"),
    ("what is always kept wins over the file", "llm", "tensor_parallel_size", 4, "--engine-arg"),
    ("an argument that equals vLLM's default is not applied", "llm", "gpu_memory_utilization", None, ""),
    ("nor where the file says something else", "llm", "max_loras", 4, "pipeline.yaml:5"),
    ("an argument that differs from it is", "llm", "enforce_eager", True, "--engine-arg"),
    ("what only vLLM knows is not for diffusion stages", "picture", "enforce_eager", None, ""),
    ("not even what is always kept", "picture", "tensor_parallel_size", None, ""),
    ("sleep mode fills every stage", "picture", "enable_sleep_mode", True, "--engine-arg"),
    ("a diffusion option fills diffusion stages", "picture", "lora_path", "l", "--engine-arg"),
    ("and no other", "llm", "lora_path", None, ""),
    ("it only fills what is unset", "picture", "lora_scale", 0.5, "pipeline.yaml:9"),
    ("also by its other name", "picture", "attention_backend", "native", "--engine-arg"),
    ("quantization only fills a diffusion stage", "picture", "quantization", "file", "pipeline.yaml:9"),
    ("and is for llm stages as any argument", "llm", "quantization", "arg", "--engine-arg"),
    ("sleep mode only fills", "llm", "enable_sleep_mode", False, "pipeline.yaml:5"),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("precedence")
    (folder / "pipeline.yaml").write_text(FILE)
    (folder / "over.yaml").write_text(OVERLAY)
    return load(
        folder / "pipeline.yaml", overlays=[folder / "over.yaml"], stage_overrides=OVERRIDES, engine_args=ARGS,
        platform="cuda",
    )  # fmt: skip


@pytest.mark.parametrize(("rule", "stage", "name", "value", "origin"), RULES, ids=[row[0] for row in RULES])
def test_rule(rule: str, stage: str, name: str, value: Any, origin: str, loaded) -> None:
    index = loaded.pipeline.stage(stage).stage_id
    assert loaded.pipeline.stages[index].engine_args.get(name) == value
    if origin:
        assert str(loaded.tree.origins[("stages", index, "engine_args", name)]).endswith(origin)


def test_left_out_arguments_are_named_in_one_warning(loaded) -> None:
    (warning,) = [text for text in loaded.warnings if "--engine-arg" in text]
    assert warning == (
        "--engine-arg: left out where the pipeline file gives the stage its own value: file_arg (llm); "
        "--stage-overrides wins over it"
    )


def test_flags_for_all_stages_win_over_the_file_and_overrides_over_them(write) -> None:
    path = write(
        "stages:\n- {name: a, runtime: {stage_init_timeout: 5}}\n- {name: b, model: own}\nrouting: {policy: random}\n"
    )
    loaded = load(
        path, model="org/model", policy="round-robin", stage_init_timeout=60.0,
        stage_overrides={"b": {"stage_init_timeout": 90}},
    )  # fmt: skip
    a, b = loaded.pipeline.stages
    assert (a.model, b.model) == ("org/model", "own"), "only what the file leaves unset"
    assert (a.runtime.stage_init_timeout, b.runtime.stage_init_timeout) == (60, 90)
    assert loaded.pipeline.routing.policy == "round-robin"
    origins = {str(loaded.tree.origins[path]) for path in (
        ("stages", 0, "model"), ("routing", "policy"), ("stages", 0, "runtime", "stage_init_timeout")
    )}  # fmt: skip
    assert origins == {"--model", "--policy", "--stage-init-timeout"}


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("max_num_seqs=8", "max_num_seqs", 8),
        ("--max-num-seqs=8", "max_num_seqs", 8),
        ("gpu_memory_utilization=0.5", "gpu_memory_utilization", 0.5),
        ("rate=1e-3", "rate", 0.001),
        ("enforce_eager=true", "enforce_eager", True),
        ("quantization=fp8", "quantization", "fp8"),
        ("quantization=null", "quantization", None),
        ('cache_config={"threshold": 0.1}', "cache_config", {"threshold": 0.1}),
        ("devices=[0, 1]", "devices", [0, 1]),
        ("path=a=b", "path", "a=b"),
        ("text=a: b: c", "text", "a: b: c"),
        ("static_lora_scale=2", "lora_scale", 2),
        ("empty=", "empty", None),
    ],
)
def test_engine_argument_of_the_command_line(word: str, name: str, value: object) -> None:
    assert parse_engine_args([word]) == {name: value}


@pytest.mark.engines
def test_defaults_are_those_of_vllm() -> None:
    """The head has no vLLM; this list is what it knows of it."""
    arguments = pytest.importorskip("vllm.engine.arg_utils").AsyncEngineArgs
    fields = {field.name: field.default for field in dataclasses.fields(arguments)}
    assert {name: fields[name] for name in VLLM_DEFAULTS} == dict(VLLM_DEFAULTS)


def test_what_is_always_kept() -> None:
    assert {
        "worker_extension_cls", "allowed_local_media_path", "allowed_media_domains", "tensor_parallel_size",
    } == ALWAYS_KEPT  # fmt: skip


def test_stage_fields_of_an_override_are_no_engine_arguments(write) -> None:
    loaded = load(write(FILE), stage_overrides={"1": {"runtime": {"num_replicas": 3}, "final_output_type": "video"}})
    stage = loaded.pipeline.stages[1]
    assert stage.runtime.num_replicas == 3 and stage.final_output_type == "video"
    assert set(stage.engine_args) == {"lora_scale", "quantization"}

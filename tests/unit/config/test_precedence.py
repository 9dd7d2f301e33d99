"""Who wins (C4), what is left out (C5) and what only fills (C6): a row a rule."""

from __future__ import annotations

from typing import Any

import pytest

from stagemesh.config import load
from stagemesh.config.overrides import ALWAYS_KEPT

FILE = """
stages:
- name: llm
  model: m
  engine_args: {file_only: file, file_overlay: file, file_arg: file, file_override: file, tensor_parallel_size: 2}
- name: picture
  stage_type: diffusion
  model: m
  engine_args: {}
"""
OVERLAY = """
stages:
- {stage_id: 0, file_overlay: overlay, overlay_only: overlay, overlay_arg: overlay, overlay_override: overlay}
platforms:
  cuda:
    stages:
    - {stage_id: 0, overlay_only: cuda}
"""
ARGS = {
    "file_arg": "arg", "overlay_arg": "arg", "arg_only": "arg", "arg_override": "arg", "tensor_parallel_size": 4,
    "gpu_memory_utilization": 0.9, "enforce_eager": True, "enable_sleep_mode": True, "lora_path": "l",
}  # fmt: skip
OVERRIDES = {"llm": {"file_override": "override", "overlay_override": "override", "arg_override": "override",
                     "engine_args": {"nested": "override"}}}  # fmt: skip

RULES: list[tuple[str, str, str, Any, str]] = [
    # rule, stage, engine argument, value, origin
    ("the file's own value", "llm", "file_only", "file", "pipeline.yaml:5"),
    ("an overlay wins over the file", "llm", "file_overlay", "overlay", "over.yaml:3"),
    ("a platform section wins over the common part", "llm", "overlay_only", "cuda", "over.yaml:7"),
    ("an argument for all stages does not win over a file's value", "llm", "file_arg", "file", "pipeline.yaml:5"),
    ("nor over an overlay's", "llm", "overlay_arg", "overlay", "over.yaml:3"),
    ("an argument reaches stages that say nothing", "llm", "arg_only", "arg", "--engine-arg"),
    ("of every kind", "picture", "arg_only", "arg", "--engine-arg"),
    ("an override wins over the file", "llm", "file_override", "override", "--stage-overrides"),
    ("over an overlay", "llm", "overlay_override", "override", "--stage-overrides"),
    ("over an argument", "llm", "arg_override", "override", "--stage-overrides"),
    ("an override may nest", "llm", "nested", "override", "--stage-overrides"),
    ("an override is for its stage only", "picture", "arg_override", "arg", "--engine-arg"),
    ("what is always kept wins over the file", "llm", "tensor_parallel_size", 4, "--engine-arg"),
    ("an argument that equals vLLM's default is not applied", "llm", "gpu_memory_utilization", None, ""),
    ("an argument that differs from it is", "llm", "enforce_eager", True, "--engine-arg"),
    ("sleep mode fills every stage", "picture", "enable_sleep_mode", True, "--engine-arg"),
    ("a diffusion option fills diffusion stages", "picture", "lora_path", "l", "--engine-arg"),
    ("and no other", "llm", "lora_path", None, ""),
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
        "--engine-arg: left out where the pipeline file gives the stage its own value: "
        "file_arg (llm), overlay_arg (llm)"
    )


def test_what_is_always_kept() -> None:
    assert {
        "worker_extension_cls", "allowed_local_media_path", "allowed_media_domains", "tensor_parallel_size",
    } == ALWAYS_KEPT  # fmt: skip


def test_stage_fields_of_an_override_are_no_engine_arguments(write) -> None:
    loaded = load(write(FILE), stage_overrides={"1": {"runtime": {"num_replicas": 3}, "final_output_type": "video"}})
    stage = loaded.pipeline.stages[1]
    assert stage.runtime.num_replicas == 3 and stage.final_output_type == "video" and stage.engine_args == {}

"""Rendered and loaded again is the same, also on the way to a worker; schemas agree with the models."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.config import Pipeline, load, load_pipeline
from stagemesh.config.load import Loaded
from stagemesh.config.origins import Origins, Tree
from stagemesh.config.read import OPEN
from stagemesh.config.render import render, render_layout
from stagemesh.config.schema import pipeline_schema, stage_schema
from tests.unit.config.conftest import FILES

FILE_CASES = sorted(path for path in FILES.glob("*.yaml") if not path.name.startswith("overlay_"))
text = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=20)
number = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
tricky = [
    "${a}",
    "\\${b}",
    "x ${",
    "a\\\\${c} $",
    "$",
    "1e3",
    "2026-12-01",
    "on",
    "~",
    "a: b",
    "- c",
    "# d",
    "a #b",
    "''",
    '"',
]
breaks = ["two\nlines", "tab\there", "\x85\u2028\ufeff", "\x00\x07", " padded ", "\n", "a\r\nb"]
scalar = (
    st.none() | st.booleans() | number | text.filter(lambda value: value != OPEN) | st.sampled_from(tricky + breaks)
)
values = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6
)
models = st.sampled_from(["models/llm", "org/name", "häßlich: #1"])
options = st.dictionaries(text, values, max_size=4)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Valid pipelines: graphs of any form, and texts that YAML or OmegaConf could misread wherever a text may stand."""
    count = draw(st.integers(1, 4))
    wiring = [draw(st.lists(st.sampled_from(range(index)), unique=True)) if index else [] for index in range(count)]
    read = {upstream for inputs in wiring for upstream in inputs}
    stages = []
    for index, inputs in enumerate(wiring):
        kind = draw(st.sampled_from(["llm", "diffusion"]))
        stages.append({
            "stage_id": index, "name": f"s{index}", "stage_type": kind, "model": draw(models),
            "engine": draw(st.sampled_from(["", "synthetic", "own.engine"])), "engine_args": draw(options),
            "inputs": [f"s{upstream}" for upstream in inputs],
            "input_adapter": draw(st.none() | st.sampled_from(["text", "chat", "os.path.join"])),
            "adapter_args": draw(options), "final_output": index not in read or draw(st.booleans()),
            "final_output_type": draw(st.sampled_from(["text", "image", "audio", "video", "latent"])),
            "edge": "stream" if inputs and kind == "llm" and draw(st.booleans()) else "whole",
            "lora_modules": draw(st.dictionaries(text, models, max_size=2)),
            "runtime": {
                "num_replicas": draw(st.integers(0, 5)), "shared_devices": draw(st.booleans()),
                "devices": draw(st.none() | st.just("auto")), "max_batch_size": draw(st.none() | st.integers(1, 9)),
                "env": draw(st.dictionaries(text, text.filter(lambda value: value != OPEN), max_size=2)),
            },
            "limits": {"max_prompt_bytes": draw(st.integers(1, 10**9))},
            "default_sampling_params": {"seed": draw(st.integers(0, 2**31)), "extra": draw(options)},
        })  # fmt: skip
    return Pipeline.model_validate({
        "name": "p", "stages": stages, "routing": {"policy": draw(st.sampled_from(["random", "on", "null", "1e3"]))},
        "limits": {"request_timeout": draw(st.none() | st.floats(0.001, 1e6))},
    })  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(pipelines())
def test_any_pipeline_rendered_and_loaded_again_is_the_same(pipeline: Pipeline) -> None:
    rendered = render(Loaded(pipeline, Tree({}, Origins())))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        file.write(rendered + render_layout(pipeline))
    try:
        again = load_pipeline(file.name)
    finally:
        os.unlink(file.name)
    assert again == pipeline
    assert again.revision == pipeline.revision


@settings(max_examples=200, deadline=None)
@given(pipelines())
def test_any_pipeline_survives_the_way_to_a_worker(pipeline: Pipeline) -> None:
    assert Pipeline.model_validate_json(pipeline.model_dump_json()) == pipeline


@pytest.mark.parametrize("path", FILE_CASES, ids=lambda path: path.stem)
def test_files_rendered_and_loaded_again_are_the_same(path: Path, write) -> None:
    loaded = load(path, model="models/some")
    assert load_pipeline(write(render(loaded))) == loaded.pipeline


def test_render_says_where_each_value_comes_from(write) -> None:
    path = write("stages:\n- name: a\n  model: m\n  engine_args:\n    max_num_seqs: 4\n")
    loaded = load(path, stage_overrides={"a": {"runtime": {"num_replicas": 2}}}, engine_args={"x": 1})
    lines = render(loaded).splitlines()
    origin = {line.split(":")[0].strip(" -"): line.rpartition(" # ")[2] for line in lines if " # " in line}
    assert origin["max_num_seqs"] == f"{path}:5"
    assert origin["num_replicas"] == "--stage-overrides"
    assert origin["x"] == "--engine-arg"
    assert origin["shared_devices"] == origin["edge"] == origin["policy"] == "default"
    assert origin["stage_id"] == origin["inputs"] == "default", "what resolve fills in was written by nobody"


def _is_plain(path: Path) -> bool:
    written = path.read_text()
    return not any(word in written for word in ("stage_args", "base_config", "oc.env"))


@pytest.mark.parametrize("path", [path for path in FILE_CASES if _is_plain(path)], ids=lambda path: path.stem)
def test_schema_accepts_our_files(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), pipeline_schema())


def test_schema_refuses_a_misspelt_key() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"stages": [{"name": "a", "modell": "m"}]}, pipeline_schema())


def test_stage_schema_describes_what_travels() -> None:
    stage = load_pipeline(FILES / "prefill_decode.yaml").stages[0]
    jsonschema.validate(stage.model_dump(mode="json"), stage_schema())


def test_adapter_names_are_those_of_the_worker() -> None:
    from stagemesh.config.validate import BUILT_IN_ADAPTERS
    from stagemesh_worker.adapters.builtin import BUILT_IN

    assert set(BUILT_IN_ADAPTERS) == set(BUILT_IN)

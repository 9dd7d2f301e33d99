"""Files of the shapes that occur, and exactly what becomes of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from stagemesh.config import load, load_pipeline
from stagemesh.config.layout import devices_per_replica, split_devices
from tests.unit.config.conftest import FILES

PIPELINES = sorted(path for path in FILES.glob("*.yaml") if not path.name.startswith("overlay_"))


def groups(stage):
    return split_devices(stage.runtime.devices, stage.runtime.num_replicas, devices_per_replica(stage))


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_every_file_loads(path) -> None:
    assert load_pipeline(path).stages


def test_stage_args_form_becomes_ours() -> None:
    loaded = load(FILES / "omni_thinker_talker.yaml")
    thinker, talker, vocoder = loaded.pipeline.stages
    assert [stage.name for stage in loaded.pipeline.stages] == ["thinker", "talker", "code2wav"]
    assert (thinker.inputs, talker.inputs, vocoder.inputs) == ((), ("thinker",), ("talker",))
    assert talker.input_adapter == "adapters_for_tests.thinker2talker"
    assert (thinker.final_output, talker.final_output, vocoder.final_output) == (True, False, True)
    assert vocoder.final_output_type == "audio"
    assert thinker.is_comprehension and thinker.runtime.max_batch_size == 1
    assert thinker.model == "models/omni"
    assert thinker.engine_args == {"gpu_memory_utilization": 0.8, "max_num_batched_tokens": 32768}
    assert thinker.default_sampling_params["repetition_penalty"] == 1.1


def test_window_decides_between_whole_and_stream() -> None:
    _, talker, vocoder = load_pipeline(FILES / "omni_thinker_talker.yaml").stages
    assert (talker.edge, vocoder.edge) == ("whole", "stream")


def test_what_has_no_meaning_is_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_pipeline(FILES / "omni_thinker_talker.yaml")
    (record,) = caplog.records
    for name in ("stages[0].engine_args.worker_cls", "runtime.enabled", "runtime.defaults.max_inflight"):
        assert name in record.getMessage()


def test_diffusion_stage_takes_the_world_size_of_its_parallel_config() -> None:
    (stage,) = load_pipeline(FILES / "single_diffusion_parallel.yaml").stages
    assert (stage.engine, devices_per_replica(stage), groups(stage)) == ("diffusion", 4, [[0, 1, 2, 3]])


def test_prefill_decode_pair_loads() -> None:
    prefill, decode = load_pipeline(FILES / "prefill_decode.yaml").stages
    assert prefill.is_prefill_only and decode.is_decode_only and decode.inputs == ("prefill",)
    assert decode.final_output and not prefill.final_output
    assert decode.input_adapter == prefill.input_adapter == "chat"


def test_deploy_overlay_lies_over_the_pipeline() -> None:
    base, over = FILES / "omni_thinker_talker.yaml", FILES / "overlay_async.yaml"
    loaded = load(base, overlays=[over])
    thinker, talker, _ = loaded.pipeline.stages
    assert thinker.engine_args["gpu_memory_utilization"] == 0.6 and thinker.engine_args["max_num_seqs"] == 16
    assert talker.edge == "whole", "what the pipeline says of an edge is kept"
    assert any("connectors" in warning for warning in loaded.warnings)


@pytest.mark.parametrize(("platform", "share"), [("", 0.6), ("cuda", 0.9), ("npu", 0.7), ("cpu", 0.6)])
def test_platform_section_wins_over_the_common_part(platform: str, share: float) -> None:
    base, over = FILES / "omni_thinker_talker.yaml", FILES / "overlay_async.yaml"
    thinker = load_pipeline(base, overlays=[over], platform=platform).stages[0]
    assert thinker.engine_args["gpu_memory_utilization"] == share
    assert thinker.engine_args.get("enforce_eager") == (True if platform == "npu" else None)


def test_async_chunk_makes_edges_stream_that_say_nothing(write) -> None:
    base = write("stages:\n- {name: a, model: m}\n- {name: b, model: m}\n")
    over = write("async_chunk: true\n", "over.yaml")
    assert [stage.edge for stage in load_pipeline(base, overlays=[over]).stages] == ["whole", "stream"]


def test_base_config_is_inherited() -> None:
    loaded = load(FILES / "inherits.yaml")
    talker = loaded.pipeline.stages[1]
    assert (talker.runtime.num_replicas, groups(talker)) == (2, [[1], [2]])
    assert talker.default_sampling_params == {
        "temperature": 0.5, "top_p": 0.8, "top_k": 40, "stop_token_ids": [8294],
    }  # fmt: skip
    assert loaded.tree.origins[("stages", 1, "runtime", "devices")].source.endswith("inherits.yaml")
    assert loaded.tree.origins[("stages", 1, "engine_args", "gpu_memory_utilization")].source.endswith("talker.yaml")


def test_listed_devices_are_a_pool_or_a_template() -> None:
    assert groups(load_pipeline(FILES / "replicas_on_listed_devices.yaml").stages[0]) == [[1, 2], [3, 4]]
    assert groups(load_pipeline(FILES / "template_devices.yaml").stages[0]) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_graph_with_several_inputs_and_outputs() -> None:
    pipeline = load_pipeline(FILES / "several_outputs.yaml")
    assert [stage.name for stage in pipeline.outputs()] == ["planner", "speaker", "judge"]
    assert pipeline.stage("judge").inputs == ("planner", "painter")
    assert pipeline.stage(2).inputs == ("planner",), "an input may be written as an id"
    assert [stage.name for stage in pipeline.consumers(pipeline.stage("planner"))] == ["painter", "speaker", "judge"]
    assert pipeline.limits.request_timeout is None and pipeline.routing.policy == "prefix-affinity"


def test_interpolation_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_pipeline(FILES / "environment.yaml").name == "fallback"
    monkeypatch.setenv("STAGEMESH_TEST_NAME", "from-outside")
    pipeline = load_pipeline(FILES / "environment.yaml")
    assert pipeline.name == "from-outside"
    assert pipeline.stages[0].default_sampling_params == {"max_tokens": 512}


def test_stage_without_replicas_here_is_for_other_nodes() -> None:
    writer, painter = load_pipeline(FILES / "remote_stage.yaml").stages
    assert writer.runtime.num_replicas == 0 and painter.runtime.shared_devices and groups(painter) is None


def test_code_in_a_file_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class Engine: ...\ndef adapter(): ...\n")
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        "stages:\n- {name: a, stage_type: audio, engine: own.py:Engine, input_adapter: ./own.py:adapter,\n"
        "   prompt_expand: math:sqrt}\n- {name: b, model: m}\n"
    )
    stage = load_pipeline(path).stage("a")
    assert (stage.engine, stage.input_adapter) == (f"{tmp_path}/own.py:Engine", f"{tmp_path}/own.py:adapter")
    assert stage.prompt_expand == "math:sqrt"


def test_paths_are_relative_to_the_file_that_they_are_written_in(write, tmp_path, monkeypatch) -> None:
    for name in ("models/llm", "adapters/ink", "pictures"):
        (tmp_path / name).mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    path = write(
        "stages:\n"
        "- name: a\n"
        "  model: models/llm\n"
        "  lora_modules: {ink: adapters/ink, hub: someone/adapter, missing: ./gone}\n"
        "  engine_args: {allowed_local_media_path: pictures, dtype: adapters/ink}\n"
        "- {name: b, stage_type: diffusion, model: m, engine_args: {lora_path: adapters/ink}}\n"
    )
    first, second = load(path).pipeline.stages
    assert first.model == str(tmp_path / "models/llm")
    assert first.lora_modules == {
        "ink": str(tmp_path / "adapters/ink"), "hub": "someone/adapter", "missing": str(tmp_path / "gone"),
    }  # fmt: skip
    assert first.engine_args == {"allowed_local_media_path": str(tmp_path / "pictures"), "dtype": "adapters/ink"}
    assert second.engine_args == {"lora_path": str(tmp_path / "adapters/ink")}


def test_media_go_to_the_first_stage_unless_a_later_one_asks_for_them(write) -> None:
    last = "{name: c, model: m, media_inputs: [image]}"
    path = write(f"stages:\n- {{name: a, model: m}}\n- {{name: b, model: m}}\n- {last}\n")
    assert [stage.media_inputs for stage in load(path).pipeline.stages] == [("image", "audio", "video"), (), ("image",)]
    path = write("stage_args:\n- {stage_id: 0}\n- {stage_id: 1, runtime: {requires_multimodal_data: true}}\n")
    assert load(path, model="m").pipeline.stages[1].media_inputs == ("image", "audio", "video")

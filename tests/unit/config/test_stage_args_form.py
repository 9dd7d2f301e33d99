"""Files of vLLM-Omni's forms load as they are (C3): what becomes of each name, and what is said to have no meaning."""

from __future__ import annotations

import pytest

from stagemesh.config import ConfigError, Loaded, load
from tests.unit.config.conftest import FILES

ONE = "stage_args:\n- {stage_id: 0}\n"


def ignored(loaded: Loaded) -> str:
    """The one warning about what has no meaning."""
    (warning,) = [text for text in loaded.warnings if "has no meaning here" in text]
    return warning


def test_chunked_speech_pipeline() -> None:
    loaded = load(FILES / "speech_chunked.yaml", model="/models/omni")
    thinker, talker, vocoder = loaded.pipeline.stages
    assert [stage.name for stage in loaded.pipeline.stages] == ["thinker", "talker", "code2wav"]
    assert {stage.model for stage in loaded.pipeline.stages} == {"/models/omni"}
    assert (thinker.edge, talker.edge, vocoder.edge) == ("whole", "stream", "stream")
    assert thinker.engine_args == {
        "tensor_parallel_size": 2, "gpu_memory_utilization": 0.7, "max_num_batched_tokens": 16384,
        "distributed_executor_backend": "mp",
    }  # fmt: skip
    assert thinker.default_sampling_params == {"temperature": 0.6, "top_p": 0.95, "max_tokens": 1024, "seed": 7}
    assert talker.default_sampling_params["extra"] == {"flat_logprobs": False}, "only the engine knows it"
    assert thinker.final_output_type == "text" and vocoder.final_output_type == "audio"


def test_everything_without_a_meaning_is_named_once_with_the_reason() -> None:
    warning = ignored(load(FILES / "speech_chunked.yaml", model="m"))
    for name in (
        "stages[0].engine_args.model_arch (the model's folder says it)",
        "stages[0].engine_args.worker_type (see stage_type)",
        "stages[0].engine_args.scheduler_cls (a class of that system)",
        "stages[0].engine_args.hf_config_name",
        "stages[0].engine_args.engine_output_type (see final_output_type)",
        "stages[0].engine_args.custom_process_next_stage_input_func (the consumer's input_adapter reads chunks too)",
        "stages[0].default_sampling_params.detokenize (text is always made)",
        "stages[2].runtime.process (a replica is always a process of its own)",
        "stages[2].tts_args",
    ):
        assert warning.count(name) == 1, name
    assert "model_stage" not in warning, "it became the name"


def test_devices_listed_twice_are_shared() -> None:
    thinker, talker, vocoder = load(FILES / "speech_chunked.yaml", model="m").pipeline.stages
    assert (thinker.runtime.shared_devices, talker.runtime.shared_devices) == (False, False)
    assert vocoder.runtime.shared_devices, "it and the talker are both on device 2"


def test_our_own_form_does_not_share_what_is_listed_twice(write) -> None:
    path = write(
        "stages:\n- {name: a, model: m, runtime: {devices: '0'}}\n- {name: b, model: m, runtime: {devices: '0'}}\n"
    )
    assert not any(stage.runtime.shared_devices for stage in load(path).pipeline.stages)


def test_file_without_models_loads_with_a_warning() -> None:
    loaded = load(FILES / "speech_chunked.yaml")
    assert [stage.model for stage in loaded.pipeline.stages] == ["", "", ""]
    missing = [text for text in loaded.warnings if "model: is missing" in text]
    assert len(missing) == 3 and missing[1].endswith(
        "stages[1].model: is missing; want a folder or the name of a model"
    )


def test_function_of_that_system_loads_with_a_warning(write) -> None:
    path = write(
        "stage_args:\n- {stage_id: 0}\n- {stage_id: 1, custom_process_input_func: vllm_omni.some.thinker2talker}\n"
    )
    loaded = load(path, model="m")
    assert loaded.pipeline.stages[1].input_adapter == "vllm_omni.some.thinker2talker"
    assert any(":3: stages[1].input_adapter: " in text and "no module 'vllm_omni'" in text for text in loaded.warnings)


def test_pair_whose_halves_have_one_stage_name() -> None:
    prefill, decode, talker = load(FILES / "speech_prefill_decode.yaml", model="m").pipeline.stages
    assert (prefill.name, decode.name, talker.name) == ("thinker", "thinker-1", "talker")
    assert decode.inputs == ("thinker",) and talker.inputs == ("thinker-1",)
    assert prefill.is_prefill_only and decode.is_decode_only and not prefill.final_output
    assert (decode.edge, talker.edge) == ("whole", "stream")


def test_reader_and_painter_on_one_card() -> None:
    loaded = load(FILES / "picture_on_one_card.yaml", model="m")
    reader, painter = loaded.pipeline.stages
    assert reader.prompt_expand == "adapters_for_tests.expand_negative"
    assert painter.engine_args == {"max_num_seqs": 1}, "what only vLLM knows would stop the diffusion engine"
    assert "stages[1].engine_args.enforce_eager (the diffusion engine has none)" in ignored(loaded)
    assert "stages[1].cfg_kv_collect_func (companions arrive at the adapter by role)" in ignored(loaded)
    assert "stages[0].output_connectors (stages exchange tensors by reference)" in ignored(loaded)
    assert painter.default_sampling_params == {
        "seed": 52, "num_inference_steps": 50, "extra": {"cfg_text_scale": 4.0}
    }  # fmt: skip
    assert painter.runtime.shared_devices


def test_edges_alone_say_who_reads_whom(write) -> None:
    path = write(
        "stage_args:\n- {stage_id: 0}\n- {stage_id: 1, engine_input_source: []}\n- {stage_id: 2}\n"
        "runtime: {defaults: {window_size: 3}, edges: [{from: 0, to: 2}, {from: 1, to: 2, window_size: -1}]}\n"
    )
    stages = load(path, model="m").pipeline.stages
    assert stages[2].inputs == ("stage-0", "stage-1") and stages[2].edge == "stream"
    assert stages[1].inputs == () and stages[1].edge == "whole"


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("stage_args: {}\n", ":1: stage_args: {}: want a list of stages"),
        ("stage_args: [x]\n", ":1: stage_args[0]: 'x': want a mapping"),
        ("stage_args:\n- {engine_args: 3}\n", ":2: stage_args[0].engine_args: 3: want a mapping"),
        (ONE + "- {stage_id: 1, final_outptu: true}\n", "[1].final_outptu: unknown key; did you mean final_output?"),
        (ONE + "- {stage_id: 1, runtime: {devics: '0'}}\n", "runtime.devics: unknown key; did you mean devices?"),
        (ONE + "runtime: 3\n", ":3: runtime: 3: want a mapping"),
        (ONE + "runtime: {defaults: 3}\n", ":3: runtime.defaults: 3: want a mapping"),
        (ONE + "runtime: {edges: 3}\n", ":3: runtime.edges: 3: want a list of edges"),
        (ONE + "runtime: {edges: [{from: 0}]}\n", "edges[0]: {'from': 0}: an edge is {from, to, window_size}"),
        (ONE + "runtime: {edges: [{from: 0, to: 5}]}\n", "edges[0].to: 5: no stage has this id; stages are 0"),
        (
            ONE + "- {stage_id: 1}\nruntime: {edges: [{from: 0, to: 1, window_size: 0}]}\n",
            "edges[0].window_size: 0: want -1 (the whole output) or a number of chunks from 1",
        ),
    ],
)
def test_mistakes_in_such_a_file(written: str, says: str, write) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(written), model="m")
    assert says in str(caught.value)


# -- deploy overlays --------------------------------------------------------
def test_production_overlay() -> None:
    loaded = load(FILES / "speech_chunked.yaml", model="m", overlays=[FILES / "overlay_production.yaml"])
    thinker, talker, vocoder = loaded.pipeline.stages
    assert (thinker.runtime.devices, talker.runtime.devices) == ("0", "1")
    assert thinker.engine_args["max_num_seqs"] == 32 and thinker.engine_args["tensor_parallel_size"] == 2
    assert thinker.runtime.env == {"OMP_NUM_THREADS": "4"}
    assert thinker.default_sampling_params["max_tokens"] == 512 and thinker.default_sampling_params["seed"] == 7
    assert [stage.engine_args["trust_remote_code"] for stage in loaded.pipeline.stages] == [True, True, True]
    assert [stage.engine_args["enable_prefix_caching"] for stage in loaded.pipeline.stages] == [False, True, False]
    assert (talker.edge, vocoder.edge) == ("stream", "whole"), "an edge with a window, and async_chunk: false"
    assert vocoder.runtime.shared_devices and not talker.runtime.shared_devices
    for name in ("pipeline", "connectors (stages exchange", "stages[0].output_connectors", "edges[0].max_inflight"):
        assert name in ignored(loaded)


@pytest.mark.parametrize(
    ("platform", "devices", "seqs", "parallel"), [("", "3", 2, 2), ("rocm", "3", 2, 2), ("npu", "0,1", 1, 2)]
)
def test_platform_section_wins_over_all_common_parts_of_what_is_inherited(
    platform: str, devices: str, seqs: int, parallel: int
) -> None:
    loaded = load(FILES / "speech_chunked.yaml", model="m", overlays=[FILES / "overlay_small.yaml"], platform=platform)
    thinker, talker, _ = loaded.pipeline.stages
    assert thinker.runtime.devices == devices
    assert thinker.engine_args["max_num_seqs"] == seqs and thinker.engine_args["tensor_parallel_size"] == parallel
    assert talker.engine_args.get("enforce_eager") == (True if platform == "rocm" else None)


def test_later_overlay_wins(write) -> None:
    base = write("stages:\n- {name: a, model: m, engine_args: {x: {p: 0, q: 0}}}\n")
    one = write("stages:\n- {stage_id: 0, x: {q: 1}, y: 1}\n", "one.yaml")
    two = write("stages:\n- {name: a, y: 2, inputs: []}\n", "two.yaml")
    (stage,) = load(base, overlays=[one, two]).pipeline.stages
    assert stage.engine_args == {"x": {"p": 0, "q": 1}, "y": 2}


def test_overlay_sets_limits_and_routing(write) -> None:
    base = write("stages:\n- {name: a, model: m}\nlimits: {max_inflight: 3, max_waiting: 4}\n")
    over = write("limits: {max_inflight: 8}\nrouting: {policy: random}\nname: b\n", "over.yaml")
    loaded = load(base, overlays=[over])
    assert (loaded.pipeline.limits.max_inflight, loaded.pipeline.limits.max_waiting) == (8, 4)
    assert (loaded.pipeline.routing.policy, loaded.pipeline.name) == ("random", "b")
    assert str(loaded.tree.origins[("limits", "max_inflight")]).endswith("over.yaml:1")
    assert str(loaded.tree.origins[("limits", "max_waiting")]).endswith("pipeline.yaml:3")


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("stages: {}\n", "over.yaml:1: stages: {}: want a list of stages"),
        ("stages: [{devices: '0'}]\n", "stages[0]: {'devices': '0'}: a stage of an overlay names its stage_id or name"),
        ("platforms: [cuda]\n", "over.yaml:1: platforms: ['cuda']: want a mapping by platform"),
        ("platforms: {cuda: [1]}\n", "over.yaml:1: platforms.cuda: [1]: want a mapping with `stages`"),
        ("stages: [{stage_id: 0, env: 3}]\n", "over.yaml:1: stages[0].runtime.env: 3: want a dictionary"),
        ("stages: [{stage_id: 0, engine_args: 3}]\n", "over.yaml:1: stages[0].engine_args: 3: want a mapping"),
        ("stages: [{stage_id: 0, num_replicas: many}]\n", "over.yaml:1: stages[0].runtime.num_replicas: 'many': want"),
    ],
)
def test_mistakes_in_an_overlay(written: str, says: str, write) -> None:
    base = write("stages:\n- {name: a, model: m}\n")
    with pytest.raises(ConfigError) as caught:
        load(base, overlays=[write(written, "over.yaml")], platform="cuda")
    assert says in str(caught.value)

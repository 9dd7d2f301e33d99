"""Mistakes that people make, each with the one line that answers it."""

from __future__ import annotations

import pytest

from stagemesh.config import ConfigError, default_pipeline, load_pipeline
from stagemesh.config.overrides import parse_engine_args, parse_stage_overrides

ONE = "stages:\n- {name: a, model: m}\n"
TWO = ONE + "- {name: b, model: m}\n"

FILES = {
    "a tab": (
        "stages:\n\t- name: a\n",
        "pipeline.yaml:2: a tab indents this line; YAML indents with spaces",
    ),
    "a duplicate stage id": (
        "stages:\n- {stage_id: 0, name: a, model: m}\n- {stage_id: 0, name: b, model: m}\n",
        "pipeline.yaml:3: stages[1].stage_id: 0: two stages have this id; want 1, or leave stage_id out",
    ),
    "a gap in the ids": (
        "stages:\n- {stage_id: 0, name: a, model: m}\n- {stage_id: 2, name: b, model: m}\n",
        "pipeline.yaml:3: stages[1].stage_id: 2: ids count from 0 without a gap; want 1, or leave stage_id out",
    ),
    "ids out of order": (
        "stages:\n- {stage_id: 1, name: a, model: m}\n- {stage_id: 0, name: b, model: m}\n",
        "pipeline.yaml:2: stages[0].stage_id: 1: stages stand in the order of their ids; want 0, or leave stage_id out",
    ),
    "a duplicate name": (
        "stages:\n- {name: a, model: m}\n- {name: a, model: m, inputs: []}\n",
        "pipeline.yaml:3: stages[1].name: 'a': stage 0 has this name too",
    ),
    "a cycle": (
        "stages:\n- {name: a, model: m, inputs: [b]}\n- {name: b, model: m, inputs: [a]}\n"
        "- {name: c, model: m, inputs: []}\n",
        "pipeline.yaml:2: stages[0].inputs: the stages form a cycle: a reads b reads a",
    ),
    "an input that is not there": (
        "stages:\n- {name: writer, model: m}\n- {name: b, model: m, inputs: [writr]}\n",
        "pipeline.yaml:3: stages[1].inputs[0]: 'writr': the pipeline has no such stage; did you mean writer?",
    ),
    "two prefill stages": (
        "stages:\n- {name: a, model: m, is_prefill_only: true}\n- {name: b, model: m, is_prefill_only: true}\n",
        "pipeline.yaml:3: stages[1].is_prefill_only: True: 'a' is is_prefill_only too: "
        "a pipeline has one prefill/decode pair",
    ),
    "companions of a later stage": (
        ONE + "- {name: b, model: m, prompt_expand: adapters_for_tests.expand_negative}\n- {name: c, model: m}\n",
        "pipeline.yaml:3: stages[1].prompt_expand: 'adapters_for_tests.expand_negative': only the first stage, "
        "which reads the request's prompt, makes companions; move it to stages[0]",
    ),
    "companions that nobody reads": (
        "stages:\n- {name: a, model: m, prompt_expand: adapters_for_tests.expand_negative}\n",
        "pipeline.yaml:2: stages[0].prompt_expand: 'adapters_for_tests.expand_negative': no stage reads the "
        "companions; want a later stage with inputs: [a] and edge: whole",
    ),
    "companions for a stream": (
        "stages:\n- {name: a, model: m, prompt_expand: adapters_for_tests.expand_negative}\n"
        "- {name: b, model: m, edge: stream}\n",
        "pipeline.yaml:2: stages[0].prompt_expand: 'adapters_for_tests.expand_negative': no stage reads the "
        "companions; want a later stage with inputs: [a] and edge: whole",
    ),
    "companions of a function that is not there": (
        "stages:\n- {name: a, model: m, prompt_expand: adapters_for_tests.expand_negativ}\n- {name: b, model: m}\n",
        "pipeline.yaml:2: stages[0].prompt_expand: 'adapters_for_tests.expand_negativ': "
        "module 'adapters_for_tests' has no 'expand_negativ'; did you mean expand_negative?",
    ),
    "a control method that is private": (
        "stages:\n- {name: a, model: m, control_methods: [_reset]}\n",
        "pipeline.yaml:2: stages[0].control_methods[0]: '_reset': "
        "String should match pattern '^[A-Za-z][A-Za-z0-9_]*$'",
    ),
    "half a pair": (
        "stages:\n- {name: a, model: m, is_prefill_only: true}\n- {name: b, model: m}\n",
        "pipeline.yaml:2: stages[0]: 'a' is half of a prefill/decode pair; set is_decode_only: true on the other half",
    ),
    "halves of a pair with different connectors": (
        "stages:\n- {name: a, model: m, is_prefill_only: true, connector: NixlConnector}\n"
        "- {name: b, model: m, is_decode_only: true, connector: NixConnector}\n",
        "pipeline.yaml:3: stages[1].connector: 'NixConnector': both halves of the pair need the same connector; "
        "a has 'NixlConnector'",
    ),
    "a pair without a connector": (
        "stages:\n- {name: a, model: m, is_prefill_only: true}\n- {name: b, model: m, is_decode_only: true}\n",
        "pipeline.yaml:3: stages[1].connector: a prefill/decode pair needs a connector; "
        "such as connector: NixlConnector, on both",
    ),
    "halves of a pair with different parallelism": (
        "stages:\n- {name: a, model: m, is_prefill_only: true, connector: c, engine_args: {tensor_parallel_size: 2}}\n"
        "- {name: b, model: m, is_decode_only: true, connector: c}\n",
        "pipeline.yaml:3: stages[1].engine_args.tensor_parallel_size: 1: "
        "both halves of the pair need the same tensor_parallel_size; a has 2",
    ),
    "halves of a pair with the wrong roles": (
        "stages:\n- {name: a, model: m, is_prefill_only: true, connector: c, "
        "engine_args: {kv_transfer_config: {kv_role: kv_consumer}}}\n"
        "- {name: b, model: m, is_decode_only: true, connector: c}\n",
        "pipeline.yaml:2: stages[0].engine_args.kv_transfer_config.kv_role: 'kv_consumer': want kv_producer",
    ),
    "halves of a pair with different adapters": (
        "stages:\n- {name: a, model: m, is_prefill_only: true, connector: c, input_adapter: chat}\n"
        "- {name: b, model: m, is_decode_only: true, connector: c, input_adapter: text}\n",
        "pipeline.yaml:3: stages[1].input_adapter: 'text': both halves of the pair need the same input_adapter; "
        "a has 'chat'",
    ),
    "halves of a pair with different models": (
        "stages:\n- {name: a, model: m, is_prefill_only: true, connector: c}\n"
        "- {name: b, model: n, is_decode_only: true, connector: c}\n",
        "pipeline.yaml:3: stages[1].model: 'n': both halves of the pair need the same model; a has 'm'",
    ),
    "halves of a pair with different types of cache": (
        "stages:\n- {name: a, model: m, is_prefill_only: true, connector: c, engine_args: {kv_cache_dtype: fp8}}\n"
        "- {name: b, model: m, is_decode_only: true, connector: c}\n",
        "pipeline.yaml:3: stages[1].engine_args.kv_cache_dtype: "
        "both halves of the pair need the same kv_cache_dtype; a has 'fp8'",
    ),
    "a decode stage that reads its prefill stage as a stream": (
        "stages:\n- {name: a, model: m, is_prefill_only: true, connector: c}\n"
        "- {name: b, model: m, is_decode_only: true, connector: c, edge: stream}\n",
        "pipeline.yaml:3: stages[1].edge: 'stream': both halves of the pair need the whole prompt",
    ),
    "half a pair with two connectors": (
        "stages:\n- {name: a, model: m, is_prefill_only: true, connector: c}\n"
        "- {name: b, model: m, is_decode_only: true, connector: c, "
        "engine_args: {kv_transfer_config: {kv_connector: d}}}\n",
        "pipeline.yaml:3: stages[1].engine_args.kv_transfer_config.kv_connector: 'd': want c, as `connector` says",
    ),
    "a pair of another type": (
        "stages:\n- {name: a, model: m, is_prefill_only: true, connector: c}\n"
        "- {name: b, model: m, is_decode_only: true, connector: c, stage_type: diffusion}\n",
        "pipeline.yaml:3: stages[1].stage_type: 'diffusion': only llm stages make a prefill/decode pair",
    ),
    "a decode stage that reads another stage too": (
        "stages:\n- {name: a, model: m, is_prefill_only: true, connector: c}\n- {name: x, model: m, inputs: []}\n"
        "- {name: b, model: m, is_decode_only: true, connector: c, inputs: [a, x]}\n",
        "pipeline.yaml:4: stages[2].inputs: ['a', 'x']: the decode stage reads the prefill stage only; "
        "want inputs: [a]",
    ),
    "a prefill stage that the client reads": (
        "stages:\n- {name: a, model: m, is_prefill_only: true, connector: c, final_output: true}\n"
        "- {name: b, model: m, is_decode_only: true, connector: c}\n",
        "pipeline.yaml:2: stages[0]: a prefill stage has an output for its decode stage only, "
        "and the client would get it",
    ),
    "a stage that nobody reads": (
        "stages:\n- {name: a, model: m}\n- {name: b, model: m, inputs: []}\n- {name: c, model: m, inputs: [a]}\n"
        "- {name: d, model: m, inputs: [a], final_output: false}\n",
        "pipeline.yaml:5: stages[3].final_output: False: nobody gets the output of this stage; "
        "set final_output: true, or let another stage read it",
    ),
    "three devices for two replicas of two": (
        "stages:\n- name: a\n  model: m\n  engine_args: {tensor_parallel_size: 2}\n"
        '  runtime: {num_replicas: 2, devices: "0,1,2"}\n',
        "pipeline.yaml:5: stages[0].runtime.devices: '0,1,2': 3 devices for 2 replicas of 2; "
        "list 4 devices (a pool) or 2 (a template)",
    ),
    "negative replicas": (
        "stages:\n- {name: a, model: m, runtime: {num_replicas: -1}}\n",
        "pipeline.yaml:2: stages[0].runtime.num_replicas: -1: want 0 or more",
    ),
    "a misspelt stage key": (
        "stages:\n- {name: a, model: m, engin_args: {}}\n",
        "pipeline.yaml:2: stages[0].engin_args: unknown key; did you mean engine_args?",
    ),
    "a misspelt runtime key": (
        "stages:\n- {name: a, model: m, runtime: {num_replica: 2}}\n",
        "pipeline.yaml:2: stages[0].runtime.num_replica: unknown key; did you mean num_replicas?",
    ),
    "a misspelt key at the top": (
        "stage:\n- {name: a, model: m}\nstages:\n- {name: a, model: m}\n",
        "pipeline.yaml:1: stage: unknown key; did you mean stages?",
    ),
    "an engine option beside the stage's own": (
        "stages:\n- {name: a, model: m, gpu_memory_utilization: 0.5}\n",
        "pipeline.yaml:2: stages[0].gpu_memory_utilization: unknown key; options of the engine go into `engine_args`",
    ),
    "replicas beside the stage's own": (
        "stages:\n- {name: a, model: m, num_replicas: 2}\n",
        "pipeline.yaml:2: stages[0].num_replicas: unknown key; it goes into `runtime`",
    ),
    "a model in the runtime": (
        "stages:\n- {name: a, runtime: {model: m}}\n",
        "pipeline.yaml:2: stages[0].runtime.model: unknown key; it goes into the stage itself",
    ),
    "no model": (
        "stages:\n- name: a\n",
        "pipeline.yaml:2: stages[0].model: is missing; want a folder or the name of a model",
    ),
    "a mapping that is none": (
        "stages:\n- {name: a, model: m, engine_args: [1]}\n",
        "pipeline.yaml:2: stages[0].engine_args: [1]: want a mapping",
    ),
    "a stage that is no mapping": (
        "stages:\n- painter\n",
        "pipeline.yaml:2: stages[0]: 'painter': want a mapping with `name`, `model` and so on",
    ),
    "a misspelt choice": (
        "stages:\n- {name: a, model: m, final_output_type: imgae}\n",
        "pipeline.yaml:2: stages[0].final_output_type: 'imgae': want one of text, image, audio, video, latent; "
        "did you mean image?",
    ),
    "devices that are none": (
        "stages:\n- {name: a, model: m, runtime: {devices: [a, b]}}\n",
        "pipeline.yaml:2: stages[0].runtime.devices: ['a', 'b']: "
        'want device numbers such as "0,1", a list of them, or auto',
    ),
    "a sampling parameter of the wrong type": (
        "stages:\n- {name: a, model: m, default_sampling_params: {temperature: hot}}\n",
        "pipeline.yaml:2: stages[0].default_sampling_params.temperature: 'hot': want a number",
    ),
    "a picture's parameter on a text stage": (
        "stages:\n- {name: a, model: m, default_sampling_params: {num_inference_steps: 4}}\n",
        "pipeline.yaml:2: stages[0].default_sampling_params.num_inference_steps: unknown sampling parameter; "
        "what only the engine knows goes into `extra`",
    ),
    "a diffusion stage fed by a stream": (
        "stages:\n- {name: a, model: m}\n- {name: b, model: m, stage_type: diffusion, edge: stream}\n",
        "pipeline.yaml:3: stages[1].edge: 'stream': a diffusion stage needs the whole output of the stages before; "
        "want whole",
    ),
    "a stage named like an id": (
        'stages:\n- {name: "1", model: m}\n',
        "pipeline.yaml:2: stages[0].name: '1': a name of digits only looks like an id; want a name such as stage-1",
    ),
    "a number that is none": (
        "stages:\n- {name: a, model: m, engine_args: {x: .nan}}\n",
        "pipeline.yaml:2: stages[0].engine_args.x: nan: want a finite number",
    ),
    "a value that was left open": (
        "stages:\n- name: a\n  model: ???\n",
        "pipeline.yaml:3: stages[0].model: '???': is left open; fill it in",
    ),
    "an interpolation that leads nowhere": (
        "stages:\n- {name: a, model: '${modl}'}\n",
        "pipeline.yaml: stages[0].model: Interpolation key 'modl' not found",
    ),
    "a misspelt sampling parameter": (
        "stages:\n- {name: a, model: m, default_sampling_params: {temperatur: 1}}\n",
        "pipeline.yaml:2: stages[0].default_sampling_params.temperatur: unknown sampling parameter; "
        "did you mean temperature?",
    ),
    "an adapter that does not import": (
        "stages:\n- {name: a, model: m}\n- {name: b, model: m, input_adapter: no.such.adapter}\n",
        "pipeline.yaml:3: stages[1].input_adapter: 'no.such.adapter': there is no module 'no' here; "
        "built-in ones are prompt, text, chat, tokens, embeds, diffusion",
    ),
    "an adapter that its module has not": (
        "stages:\n- {name: a, model: m}\n- {name: b, model: m, input_adapter: adapters_for_tests.thinker2taker}\n",
        "pipeline.yaml:3: stages[1].input_adapter: 'adapters_for_tests.thinker2taker': "
        "module 'adapters_for_tests' has no 'thinker2taker'; did you mean thinker2talker?",
    ),
    "a misspelt built-in adapter": (
        "stages:\n- {name: a, model: m, input_adapter: chatt}\n",
        "pipeline.yaml:2: stages[0].input_adapter: 'chatt': want `package.module.name` or `file.py:name`; "
        "did you mean chat?",
    ),
    "no stages": (
        "name: empty\n",
        "pipeline.yaml: stages: the pipeline has no stages; a pipeline file is a mapping with a list of `stages`",
    ),
    "an empty file": ("", "pipeline.yaml: is empty; a pipeline file is a mapping with `stages`"),
    "a key twice": (
        "name: a\nname: b\nstages: []\n",
        "pipeline.yaml:2: 'name' is written twice, on lines 1 and 2; keep one",
    ),
    "an engine in a file that is not there": (
        "stages:\n- {name: a, stage_type: audio, engine: 'vocoder.py:Vocoder'}\n",
        "pipeline.yaml:2: stages[0].engine: 'vocoder.py:Vocoder': there is no file vocoder.py here",
    ),
    "a name that is no label": (
        "stages:\n- {name: My Stage, model: m}\n",
        "pipeline.yaml:2: stages[0].name: 'My Stage': must be 1 to 63 of a-z, 0-9 and '-', "
        "beginning and ending with a letter or digit",
    ),
    "an unknown stage type without an engine": (
        "stages:\n- {name: a, model: m, stage_type: vocoder}\n",
        "pipeline.yaml:2: stages[0].engine: '': a stage_type other than llm, diffusion must name its engine",
    ),
}


@pytest.mark.parametrize("mistake", FILES)
def test_mistake_in_a_file_gets_its_answer(mistake: str, write) -> None:
    text, answer = FILES[mistake]
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path)
    assert str(caught.value).replace(str(path.parent) + "/", "") == answer
    assert "\n" not in str(caught.value)


def test_override_for_a_stage_that_is_not_there(write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_pipeline(write(TWO), stage_overrides={"painter": {}})
    answer = "--stage-overrides: painter: the pipeline has no stage 'painter'; stages are 0 (a), 1 (b)"
    assert str(caught.value) == answer


def test_override_is_told_the_near_stage(write) -> None:
    with pytest.raises(ConfigError, match=r"--stage-overrides: panter: .*; did you mean painter?"):
        load_pipeline(write("stages:\n- {name: painter, model: m}\n"), stage_overrides={"panter": {}})


def test_overlay_in_the_place_of_a_pipeline(write) -> None:
    with pytest.raises(ConfigError, match=r"over.yaml: this is a deploy overlay, not a pipeline; lay it over one with"):
        load_pipeline(write("stages:\n- {stage_id: 0, max_num_seqs: 4}\n", "over.yaml"))


def test_overlay_for_a_stage_that_is_not_there(write) -> None:
    over = write("stages:\n- {stage_id: 7, max_num_seqs: 4}\n", "over.yaml")
    with pytest.raises(
        ConfigError, match=r"over.yaml:2: stages\[0\]: the pipeline has no stage '7'; stages are 0 \(a\)"
    ):
        load_pipeline(write(ONE), overlays=[over])


def test_misspelt_key_of_an_overlay(write) -> None:
    with pytest.raises(ConfigError, match=r"over.yaml:1: platform: unknown key; did you mean platforms\?"):
        load_pipeline(write(ONE), overlays=[write("platform: {}\n", "over.yaml")])


def test_misspelt_platform(write) -> None:
    with pytest.raises(ConfigError, match=r"--platform: 'cdua': there is no such platform; did you mean cuda\?"):
        load_pipeline(write(ONE), platform="cdua")


def test_base_config_that_is_not_there(write) -> None:
    with pytest.raises(ConfigError, match=r"pipeline.yaml:1: base_config: '.*/none.yaml': there is no such file"):
        load_pipeline(write("base_config: none.yaml\n"))


def test_base_config_with_a_name_that_no_file_can_have(write) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_pipeline(write(f"base_config: {'x' * 5000}\n"))


def test_something_that_cannot_be_laid_over_a_pipeline(write) -> None:
    with pytest.raises(TypeError, match="'overlay' cannot be laid over a pipeline, but overlays, platform"):
        load_pipeline(write(ONE), overlay=["x"])  # type: ignore[call-arg]


def test_misspelt_field_of_an_override(write) -> None:
    with pytest.raises(ConfigError, match=r"--stage-overrides: a\.runtim: unknown key; did you mean runtime\?"):
        load_pipeline(write(ONE), stage_overrides={"a": {"runtim": {}}})


def test_invalid_json_in_an_override_says_where() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_stage_overrides('{"painter": {"runtime": }}')
    assert str(caught.value) == (
        """--stage-overrides: not JSON at character 25 (near '{"runtime": }}'): Expecting value"""
    )


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', "7"])
def test_override_that_is_no_object_of_objects(text: str) -> None:
    with pytest.raises(ConfigError, match="want an object of objects"):
        parse_stage_overrides(text)


def test_engine_argument_without_a_value() -> None:
    with pytest.raises(ConfigError, match="--engine-arg: 'max_num_seqs': want KEY=VALUE"):
        parse_engine_args(["max_num_seqs"])


def test_model_folder_that_is_neither_kind(tmp_path) -> None:
    with pytest.raises(ConfigError) as caught:
        default_pipeline(tmp_path)
    assert str(caught.value) == (
        f"--model: '{tmp_path}': has neither model_index.json nor config.json; "
        "want a diffusers folder or a Hugging Face model folder"
    )


def test_model_folder_that_is_not_there(tmp_path) -> None:
    with pytest.raises(ConfigError, match="missing': there is no such folder; want a folder"):
        default_pipeline(tmp_path / "missing")


def test_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read: No such file or directory"):
        load_pipeline(tmp_path / "missing.yaml")


def test_base_config_that_leads_back(write) -> None:
    path = write("base_config: pipeline.yaml\nstages: []\n")
    with pytest.raises(ConfigError, match=r"pipeline.yaml: base_config: '.*': leads in a circle"):
        load_pipeline(path)


def test_key_that_is_a_superscript_digit_is_an_unknown_key(write) -> None:
    path = write(ONE + "\u00b9: 1\n")
    with pytest.raises(ConfigError, match="unknown key"):
        load_pipeline(path)

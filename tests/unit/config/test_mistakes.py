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
        "pipeline.yaml:3: stages[1].stage_id: 2: ids count from 0 without a gap, in the order of the file; "
        "want 1, or leave stage_id out",
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
        "pipeline.yaml:1: stages: a and b are both is_prefill_only: a pipeline has one prefill/decode pair",
    ),
    "half a pair": (
        "stages:\n- {name: a, model: m, is_prefill_only: true}\n- {name: b, model: m}\n",
        "pipeline.yaml:1: stages: a prefill/decode pair needs exactly one stage with is_decode_only",
    ),
    "three devices for two replicas of two": (
        "stages:\n- name: a\n  model: m\n  engine_args: {tensor_parallel_size: 2}\n"
        '  runtime: {num_replicas: 2, devices: "0,1,2"}\n',
        "pipeline.yaml:5: stages[0].runtime.devices: '0,1,2': 3 devices for 2 replicas of 2; "
        "list 4 devices (a pool) or 2 (a template)",
    ),
    "negative replicas": (
        "stages:\n- {name: a, model: m, runtime: {num_replicas: -1}}\n",
        "pipeline.yaml:2: stages[0].runtime.num_replicas: -1: want greater than or equal to 0",
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
        "pipeline.yaml:2: stages[0].gpu_memory_utilization: unknown key; options of the engine go into engine_args",
    ),
    "a misspelt sampling parameter": (
        "stages:\n- {name: a, model: m, default_sampling_params: {temperatur: 1}}\n",
        "pipeline.yaml:2: stages[0].default_sampling_params.temperatur: unknown sampling parameter; "
        "did you mean temperature?",
    ),
    "an adapter that does not import": (
        "stages:\n- {name: a, model: m}\n- {name: b, model: m, input_adapter: no.such.adapter}\n",
        "pipeline.yaml:3: stages[1].input_adapter: 'no.such.adapter': there is no module 'no.such' here; "
        "built-in ones are prompt, text, chat, tokens, embeds, diffusion",
    ),
    "an adapter that its module has not": (
        "stages:\n- {name: a, model: m}\n- {name: b, model: m, input_adapter: adapters_for_tests.thinker2taker}\n",
        "pipeline.yaml:3: stages[1].input_adapter: 'adapters_for_tests.thinker2taker': "
        "module 'adapters_for_tests' has no 'thinker2taker'; did you mean thinker2talker?",
    ),
    "a misspelt built-in adapter": (
        "stages:\n- {name: a, model: m, input_adapter: chatt}\n",
        "pipeline.yaml:2: stages[0].input_adapter: 'chatt': want `package.module.function`; did you mean chat?",
    ),
    "no stages": ("name: empty\n", "pipeline.yaml: stages: a pipeline needs a list of stages"),
    "an empty file": ("", "pipeline.yaml: is empty; a pipeline file is a mapping with `stages`"),
    "a key twice": (
        "name: a\nname: b\nstages: []\n",
        "pipeline.yaml: 'name' is written twice, on lines 1 and 2; keep one",
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
    answer = "--stage-overrides: painter: 'painter': the pipeline has no such stage; stages are 0 (a), 1 (b)"
    assert str(caught.value) == answer


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
    with pytest.raises(ConfigError, match="is no folder"):
        default_pipeline(tmp_path / "missing")


def test_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read: No such file or directory"):
        load_pipeline(tmp_path / "missing.yaml")


def test_base_config_that_leads_back(write) -> None:
    path = write("base_config: pipeline.yaml\nstages: []\n")
    with pytest.raises(ConfigError, match="base_config: base_config leads back to this file"):
        load_pipeline(path)

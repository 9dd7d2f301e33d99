"""`stagemesh validate`, `render` and `schema`, as functions and as commands."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import typer
import yaml

from stagemesh.config import ConfigError
from stagemesh.config.commands import parse_node, render_file, schema_text, validate_file
from stagemesh.config.reference import reference
from stagemesh.config.schema import overlay_schema
from tests.unit.cli.conftest import Command, command  # noqa: F401  (a fixture)
from tests.unit.config.conftest import FILES

GIB = 1 << 30
TWO = "stages:\n- {name: llm, model: m}\n- {name: tts, model: m, runtime: {shared_devices: true}}\n"


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (["cuda:0=80GiB,cuda:1=80GiB"], {"cuda:0": 80 * GIB, "cuda:1": 80 * GIB}),
        (["cpu:0", "cpu:1"], {"cpu:0": 0, "cpu:1": 0}),
        (["npu:3=1.5GB"], {"npu:3": 1_500_000_000}),
        (["cuda:0 , cuda:1=512MiB"], {"cuda:0": 0, "cuda:1": 512 << 20}),
    ],
)
def test_devices_of_a_node(words: list[str], devices: dict[str, int]) -> None:
    assert parse_node(words) == devices


@pytest.mark.parametrize("word", ["0", "cuda", "cuda:0=80", "cuda:0=80Gb", "", "cuda:0,,cuda:1", "cuda:x"])
def test_devices_that_are_none(word: str) -> None:
    with pytest.raises(ConfigError, match=r"--devices: '.*': want devices such as cuda:0=80GiB"):
        parse_node([word])


def test_device_twice() -> None:
    with pytest.raises(ConfigError, match="--devices: 'cuda:0': is listed twice"):
        parse_node(["cuda:0,cuda:0=1GiB"])


def test_good_file(write) -> None:
    verdict = validate_file(path := write(TWO))
    assert verdict.is_good and verdict.text.startswith(f"{path}: pipeline (llm, tts), revision ")


def test_node_without_room(write) -> None:
    verdict = validate_file(
        path := write("stages:\n- {name: a, model: m, runtime: {num_replicas: 2}}\n"), {"cuda:0": 0}
    )
    assert (verdict.is_good, verdict.text) == (
        False,
        f"{path}:2: stages[0].runtime: a/1 finds no room on a node with cuda:0; "
        "want more devices, fewer replicas, or shared_devices: true",
    )


def test_node_without_the_memory(write) -> None:
    path = write(TWO)
    assert not validate_file(path, {"cuda:0": 24 * GIB}).is_good
    assert (
        "cuda:0 has 24.00 GiB, asked for are 44.66: llm/0 22.33, tts/0 22.33"
        in validate_file(path, {"cuda:0": 24 * GIB}).text
    )
    assert validate_file(path, {"cuda:0": 24 * GIB, "cuda:1": 24 * GIB}).is_good, "each has a card of its own"
    assert validate_file(path, {"cuda:0": 0}).is_good, "its capacity is not known"
    halves = {"llm": {"gpu_memory_utilization": 0.4}, "tts": {"gpu_memory_utilization": 0.4}}
    assert validate_file(path, {"cuda:0": 24 * GIB}, stage_overrides=halves).is_good


def test_render_shows_devices_and_ledger(write) -> None:
    text, _ = render_file(write(TWO), {"cuda:0": 48 * GIB})
    tail = [line for line in text.splitlines() if line.startswith("# ")][1:]
    assert tail == [
        "# llm/0: cuda:0",
        "# tts/0: cuda:0",
        "# cuda:0: llm/0     44.41 GiB  (92% of it + 0.25)",
        "# cuda:0: tts/0     44.41 GiB  (92% of it + 0.25)",
        "# cuda:0: in all    88.82 GiB of 48.00",
    ]


def test_render_without_a_node_says_what_the_file_says() -> None:
    text, _ = render_file(FILES / "replicas_on_listed_devices.yaml")
    assert text.endswith("# llm/0: devices 1,2\n# llm/1: devices 3,4\n")
    text, _ = render_file(FILES / "remote_stage.yaml", origins=False)
    assert "# writer: no replicas of its own; other nodes bring them\n" in text
    assert "# painter/2: 1 device, chosen by placement, which other stages may share\n" in text


def test_schemas_are_valid_schemas() -> None:
    for form in ("pipeline", "overlay", "stage"):
        jsonschema.Draft202012Validator.check_schema(json.loads(schema_text(form)))
    with pytest.raises(ConfigError, match="FORM: 'overly': there is no such form; did you mean overlay"):
        schema_text("overly")


@pytest.mark.parametrize("path", sorted(FILES.glob("overlay_*.yaml")), ids=lambda path: path.stem)
def test_overlay_schema_accepts_our_overlays(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), overlay_schema())


def test_overlay_schema_knows_our_fields() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"stages": [{"stage_id": 0, "num_replicas": -1}]}, overlay_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"stages": [{"num_replicas": 1}]}, overlay_schema())


def test_reference_page_is_what_the_code_says() -> None:
    """Made anew by `python -m stagemesh.config.reference > docs/reference/pipeline.md`."""
    page = Path(__file__).parents[3] / "docs/reference/pipeline.md"
    assert page.read_text() == reference()


# -- the commands -----------------------------------------------------------
def test_validate_command(command: Command, write) -> None:  # noqa: F811
    good, wrong = write(TWO), write("stages: []\n", "wrong.yaml")
    ended = command("validate", str(good), str(wrong))
    assert ended.code == 10
    assert ended.out.startswith(f"good    {good}: pipeline (llm, tts)")
    assert ended.err.startswith(f"wrong   {wrong}: stages: the pipeline has no stages")
    assert command("validate", str(good), "--devices", "cuda:0=24GiB").code == 10
    assert (
        command("validate", str(good), "--devices", "cuda:0=24GiB", "--engine-arg", "gpu_memory_utilization=0.3").code
        == 0
    )


def test_render_command(command: Command, write) -> None:  # noqa: F811
    path = write("stages:\n- {name: painter, model: m, stage_type: diffusion}\n")
    ended = command(
        "render", str(path), "--stage-overrides", '{"painter": {"num_replicas": 2}}', "--devices", "cpu:0,cpu:1"
    )
    assert ended.code == 0
    assert "# painter/0: cpu:0\n# painter/1: cpu:1\n" in ended.out
    assert yaml.safe_load(ended.out)["stages"][0]["runtime"]["num_replicas"] == 2
    broken = command("render", str(path), "--stage-overrides", "{")
    assert broken.code == 10 and broken.err.startswith("error: --stage-overrides: not JSON at character 2")


def test_schema_command(command: Command) -> None:  # noqa: F811
    assert json.loads(command("schema").out)["title"] == "A StageMesh pipeline"
    assert json.loads(command("schema", "overlay").out)["title"] == "A StageMesh deploy overlay"


# -- the same layers, handed on by `up` and taken by `head` -----------------
def test_files_and_flags_are_loaded_alike_by_up_and_head(write) -> None:
    from stagemesh.cli.files import PipelineSources

    path = write("stages:\n- {name: a}\n- {name: b, model: own}\n")
    over = write("platforms: {cuda: {stages: [{stage_id: 0, max_num_seqs: 3}]}}\n", "over.yaml")
    sources = PipelineSources(
        files=[path],
        model=Path("org/model"),
        stage_overrides='{"b": {"num_replicas": 2}}',
        deploy_config=[over],
        engine_arg=["enforce_eager=true"],
        platform="cuda",
        policy="random",
        stage_init_timeout=12.5,
    )
    (pipeline,) = sources.load()
    a, b = pipeline.stages
    assert (a.model, b.model, b.runtime.num_replicas, pipeline.routing.policy) == ("org/model", "own", 2, "random")
    assert a.engine_args == {"max_num_seqs": 3, "enforce_eager": True} and a.runtime.stage_init_timeout == 12.5
    assert sources.arguments() == [
        str(path), "--model", "org/model", "--stage-overrides", '{"b": {"num_replicas": 2}}',
        "--deploy-config", str(over), "--engine-arg", "enforce_eager=true", "--platform", "cuda",
        "--policy", "random", "--stage-init-timeout", "12.5",
    ]  # fmt: skip


def test_model_alone_has_its_sampling_defaults_from_the_command_line(tmp_path: Path, write) -> None:
    from stagemesh.cli.files import PipelineSources

    (tmp_path / "config.json").write_text("{}")
    text = '{"0": {"max_tokens": 64}}'
    sources = PipelineSources(model=tmp_path, default_sampling_params=text)
    (pipeline,) = sources.load()
    assert pipeline.stages[0].default_sampling_params == {"max_tokens": 64}
    assert sources.arguments()[-2:] == ["--default-sampling-params", text]
    with pytest.raises(ConfigError, match="--default-sampling-params: not JSON at character 2"):
        PipelineSources(model=tmp_path, default_sampling_params="{").load()
    with pytest.raises(typer.BadParameter, match="is for --model alone"):
        PipelineSources(files=[write(TWO)], default_sampling_params=text).load()
    with pytest.raises(typer.BadParameter, match="give pipeline files, or --model"):
        PipelineSources().load()

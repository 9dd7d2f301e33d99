"""What the vLLM engine says to a stage's configuration before it starts anything."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

MISTAKES = {
    "argument": ({"engine_args": {"max_model_length": 3}}, "did you mean max_model_len?"),
    "ours": ({"engine_args": {"model": "other"}}, "engine_args.model: is set by the mesh itself"),
    "value": ({"engine_args": {"dtype": "float33"}}, "dtype"),
    "length": ({"engine_args": {"max_model_len": 100_000}}, "max_model_len"),
    "parameter": ({"default_sampling_params": {"temprature": 1}}, "did you mean temperature?"),
    "no model": ({"model": ""}, "model: is missing"),
    "lost model": ({"model": "/nowhere/to/be/found"}, "/nowhere/to/be/found: there is no such folder"),
    "connector": ({"engine_args": {"kv_transfer_config": {"kv_role": "boss"}}}, "engine_args.kv_transfer_config"),
}
MISTAKES["slots"] = (
    {"lora_modules": {"a": "/a", "b": "/b"}, "engine_args": {"max_loras": 2}},
    "engine_args.max_loras: 2: on a CPU want 3",
)
SETTINGS = {
    "defaults": {},
    "own": {"engine_args": {"dtype": "bfloat16", "enforce_eager": False, "kv_cache_memory_bytes": 1 << 20}},
    "batch": {"runtime": {"max_batch_size": 5}},
    "lora": {"lora_modules": {"cartoon": "/tmp/cartoon"}},
    "decode": {"connector": "NixlConnector", "is_decode_only": True},
}
PROGRAM = """
import json, sys
from stagemesh.config import Stage
from stagemesh_worker.engines.base import DeviceSet, EngineConfigError
from stagemesh_worker.engines.vllm.arguments import engine_arguments
from stagemesh_worker.engines.vllm.engine import VllmEngine

cpu = DeviceSet(("cpu:0",), (0,))
mistakes, settings = json.load(sys.stdin)
answers = {}
for name, fields in mistakes.items():
    stage = Stage.model_validate(fields)
    try:
        VllmEngine.check(stage)
        VllmEngine(stage, cpu).prepare()
    except EngineConfigError as error:
        answers[name] = str(error)
for name, fields in settings.items():
    made = engine_arguments(Stage.model_validate(fields), cpu)
    transfer = made.kv_transfer_config
    answers[name] = {
        "dtype": made.dtype, "eager": made.enforce_eager, "kv": made.kv_cache_memory_bytes, "lora": made.enable_lora,
        "seqs": made.max_num_seqs, "role": transfer and transfer.kv_role,
        "buffer": transfer and transfer.kv_buffer_device,
    }
print("ANSWERS", json.dumps(answers))
"""


def _make_llava(tiny_llama: Path, folder: Path) -> Path:
    """As much of a model that reads pictures as vLLM looks at before its weights."""
    shutil.copytree(tiny_llama, folder, dirs_exist_ok=True)
    text = json.loads((folder / "config.json").read_text())
    config = {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text,
        "vision_config": {"model_type": "clip_vision_model"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def answers(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Everything in one process: the import of vLLM takes ten seconds."""
    base = {"name": "writer", "model": str(tiny_llama)}
    mistakes = {name: fields for name, (fields, _) in MISTAKES.items()}
    mistakes["pictures"] = {"model": str(_make_llava(tiny_llama, tmp_path_factory.mktemp("llava")))}
    cases = [{name: base | fields for name, fields in mistakes.items()},
             {name: base | fields for name, fields in SETTINGS.items()}]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(cases), capture_output=True, text=True, timeout=240
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")), None)
    assert line is not None, done.stderr
    return json.loads(line.removeprefix("ANSWERS "))


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_gets_one_answer_that_says_what_would_be_right(answers: dict[str, object], name: str) -> None:
    assert MISTAKES[name][1] in str(answers[name])


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_model_that_needs_torchvision_says_so_where_there_is_none(answers: dict[str, object]) -> None:
    assert "torchvision, which cannot be imported here (No module named 'torchvision')" in str(answers["pictures"])


def test_stage_goes_before_our_defaults(answers: dict[str, object]) -> None:
    defaults, own = answers["defaults"], answers["own"]
    assert (defaults["dtype"], defaults["eager"], defaults["kv"]) == ("float32", True, 64 << 20)
    assert (own["dtype"], own["eager"], own["kv"]) == ("bfloat16", False, 1 << 20)


def test_stage_settings_become_engine_arguments(answers: dict[str, object]) -> None:
    assert answers["batch"]["seqs"] == 5
    assert answers["lora"]["lora"] is True and not answers["defaults"]["lora"]
    assert (answers["decode"]["role"], answers["decode"]["buffer"]) == ("kv_consumer", "cpu")

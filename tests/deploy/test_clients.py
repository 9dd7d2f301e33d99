"""The clients in other languages against a real mesh: same bytes, typed errors, cancel, list."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import stagemesh
from stagemesh import Client, Image

CLIENTS = Path(__file__).resolve().parents[2] / "examples/clients"
COMMANDS = {
    "node": (["node", str(CLIENTS / "node/client.js")], CLIENTS / "node/node_modules"),
    "go": ([str(CLIENTS / "go/build/client")], CLIENTS / "go/build/client"),
    "java": ([str(CLIENTS / "java/build/client")], CLIENTS / "java/build/client"),
    "cpp": ([str(CLIENTS / "cpp/build/client")], CLIENTS / "cpp/build/client"),
    "ruby": (["ruby", str(CLIENTS / "ruby/client.rb")], CLIENTS / "ruby/build/generated"),
}
PIPELINE = """
name: sketch
stages:
  - name: writer
    stage_type: llm
    engine: synthetic
    final_output: true
    engine_args: {tokens: 8}
    runtime: {shared_devices: true}
  - name: painter
    stage_type: diffusion
    engine: synthetic
    engine_args: {steps: 20, step_seconds: 0.02}
"""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a running mesh with the synthetic engine."""
    path = tmp_path_factory.mktemp("sketch") / "sketch.yaml"
    path.write_text(PIPELINE)
    with stagemesh.Mesh(path) as mesh:
        yield mesh.address


@pytest.fixture(params=COMMANDS)
def client(request: pytest.FixtureRequest) -> list[str]:
    command, built = COMMANDS[request.param]
    if not built.exists() or shutil.which(command[0]) is None:
        pytest.skip(f"the {request.param} client is not built: run `make clients`")
    return command


def run(client: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*client, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_picture_has_the_same_bytes_as_the_python_clients(client: list[str], head: str, tmp_path: Path) -> None:
    done = run(client, "generate", "--head", head, "--out", str(tmp_path), "--seed", "7", "a red star")
    assert done.returncode == 0, done.stderr
    with Client(head) as python:
        frames = list(python.generate("a red star", sampling={"painter": {"seed": 7}}, timeout=60))
    (picture,) = (frame.data for frame in frames if isinstance(frame, Image))
    (saved,) = tmp_path.iterdir()
    assert saved.suffix == ".png" and saved.read_bytes() == picture
    text = "".join(frame.text for frame in frames if isinstance(frame, stagemesh.TextDelta))
    assert text and text in done.stdout
    assert f"saved {saved}" in done.stdout
    assert "painter 20/20" in done.stderr


def test_cancel_half_way_ends_the_call(client: list[str], head: str, tmp_path: Path) -> None:
    done = run(client, "generate", "--head", head, "--out", str(tmp_path), "--cancel-after", "5", "a red star")
    assert done.returncode == 3, done.stderr
    assert "cancelled" in done.stdout
    assert "painter 20/20" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_bad_request_shows_its_typed_error(client: list[str], head: str, tmp_path: Path) -> None:
    done = run(client, "generate", "--head", head, "--out", str(tmp_path), "--steps", "0", "a red star")
    assert done.returncode == 2
    assert "INVALID_REQUEST" in done.stderr and "num_inference_steps" in done.stderr


def test_list_shows_the_stages(client: list[str], head: str) -> None:
    done = run(client, "list", "--head", head)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["sketch/writer llm 1/1", "sketch/painter diffusion 1/1"]

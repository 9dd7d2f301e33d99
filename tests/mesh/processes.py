"""Processes that a test starts, and what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

PATIENCE_S = 60.0

PIPELINE = """
name: small
stages:
  - name: writer
    stage_type: llm
    engine: synthetic
    engine_args: {{tokens_per_second: {pace}}}
    runtime: {{shared_devices: true}}
    final_output: true
    default_sampling_params: {{max_tokens: 4}}
  - name: painter
    stage_type: diffusion
    engine: synthetic
"""


def write_pipeline(folder: Path, *, pace: float = 50, text: str = PIPELINE) -> Path:
    """A writer and a painter without models; the writer makes `pace` tokens a second."""
    path = folder / "pipeline.yaml"
    path.write_text(text.format(pace=pace))
    return path


def environment(folder: Path) -> dict[str, str]:
    """An environment whose temporary files and run directories are in `folder`."""
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "run").mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(folder / "tmp"), "XDG_RUNTIME_DIR": str(folder / "run")}


def start(folder: Path, *arguments: str, module: str = "stagemesh.cli.main") -> subprocess.Popen[str]:
    """Start the command in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(folder),
        start_new_session=True,
    )


def await_file(path: Path, process: subprocess.Popen[str]) -> str:
    """The content of a file that `process` is to write."""

    def written() -> bool:
        if process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode}: {process.stdout and process.stdout.read()}")
        return path.exists()

    eventually(written)
    return path.read_text().strip()


def eventually(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Look until it is so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {timeout_s} s: {condition}"
        time.sleep(0.02)


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def assert_all_gone(processes: Sequence[psutil.Process], folder: Path, timeout_s: float = 15.0) -> None:
    """None of `processes` lives, and they left no file, socket or shared memory behind."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert not alive, [(process.pid, process.cmdline()) for process in alive]
    left = [path for path in [*(folder / "tmp").rglob("*"), *(folder / "run").rglob("*")] if not path.is_dir()]
    # Lock files stay: removing one while another process opens it would give two holders.
    assert not [path for path in left if not path.parent.name.endswith("locks")], left
    pids = {str(process.pid) for process in processes}
    assert not [path for path in Path("/dev/shm").glob("stagemesh-*") if path.name.split("-")[1] in pids]

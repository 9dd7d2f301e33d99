"""Processes that a test starts, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from stagemesh.rpc.errors import MeshError

T = TypeVar("T")
READY_S = 60.0
END_S = 30.0
POLL_S = 0.02

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


def eventually(what: str, probe: Callable[[], T], timeout: float = READY_S) -> T:
    """Wait until `probe()` is true and return it. Errors of a mesh that is just not there count as "not yet"."""
    deadline, last = time.monotonic() + timeout, None
    while time.monotonic() < deadline:
        try:
            if value := probe():
                return value
        except MeshError as error:
            last = error
        time.sleep(POLL_S)
    raise AssertionError(f"not within {timeout:.0f} s: {what} (last error: {last})")


class Process:
    """One command of ours and its output."""

    def __init__(self, arguments: list[str], environment: dict[str, str], prefix: Sequence[str] = ()) -> None:
        """Args: prefix: a command that makes itself the one after it, such as `unshare`."""
        self.lines: deque[str] = deque(maxlen=2000)
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", *arguments], env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(iter(self._process.stdout.readline, ""))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout: float = END_S) -> int:
        return self._process.wait(timeout)

    def finish(self, timeout: float = END_S) -> tuple[int, str]:
        """Wait until it has ended; its exit status and its whole output."""
        code = self.wait(timeout)
        self._reader.join(timeout)
        return code, self.output

    def kill(self) -> None:
        """kill -9, and reap."""
        self._process.kill()
        self._process.wait(END_S)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None


def start(folder: Path, *arguments: str) -> Process:
    """Start `stagemesh` with these arguments; what it writes lies in `folder`."""
    return Process(["stagemesh.cli.main", *arguments], environment(folder))


def await_file(path: Path, process: Process) -> str:
    """The content of a file that `process` is to write."""
    eventually(f"it writes {path.name}", lambda: path.exists() or process.has_ended)
    assert path.exists(), process.output
    return path.read_text().strip()


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

"""Run directories: private, gone with their process, and swept when it was killed."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh_worker import rundir

HOLDER = """
import sys
from stagemesh_worker.rundir import run_directory
print(run_directory(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short one: the folders of tests are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="rundir-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        rundir.remove_run_directory()
        yield Path(folder)
        rundir.remove_run_directory()


def hold() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_process_has_one_private_directory() -> None:
    directory = rundir.run_directory()
    assert rundir.run_directory() == directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o700
    rundir.remove_run_directory()
    assert not directory.exists()
    rundir.remove_run_directory()


def test_it_goes_with_a_process_that_ends_by_itself() -> None:
    process, directory = hold()
    assert directory.is_dir()
    process.communicate("", timeout=30)
    assert not directory.exists()


def test_a_living_process_keeps_its_directory_and_a_killed_ones_is_swept() -> None:
    process, directory = hold()
    (directory / "a.sock").touch()
    assert rundir.sweep_run_directories() == []
    process.kill()
    process.communicate(timeout=30)
    assert rundir.sweep_run_directories() == [directory]
    assert not directory.exists()


def test_a_root_of_somebody_else_is_refused(own_root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    root = rundir.run_root()
    root.rmdir()
    root.symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="XDG_RUNTIME_DIR"):
        rundir.run_root()


@pytest.mark.parametrize("chars", [41, 42, 60, 200])
def test_sockets_fit_however_long_the_runtime_directory_is(
    own_root: Path, monkeypatch: pytest.MonkeyPatch, chars: int
) -> None:
    long = own_root / ("x" * (chars - len(str(own_root)) - 1))
    long.mkdir()
    monkeypatch.setattr(rundir, "_SHORT", own_root)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr(os, "getpid", lambda: 2**22)  # the largest on Linux
    directory = rundir.run_directory()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / str(uuid.uuid4())))
    fits = chars + len(f"/stagemesh-{os.getuid()}") <= 53
    assert directory.parent.parent == (long if fits else own_root)
    assert directory not in rundir.sweep_run_directories()

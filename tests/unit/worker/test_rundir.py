"""Run directories: private, gone with their process, and swept when it was killed."""

from __future__ import annotations

import stat
import subprocess
import sys
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
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    rundir.remove_run_directory()
    return tmp_path


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

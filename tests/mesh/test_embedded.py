"""`stagemesh.Mesh`: a whole mesh inside a program."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from stagemesh import AsyncMesh, Finished, Image, Mesh, NotFound, StartFailed, TextDelta
from tests.mesh.processes import READY_S, assert_all_gone, environment, eventually, family, write_pipeline


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep temporary files and run directories in the test's folder."""
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, environment(tmp_path)[name])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_R20_a_mesh_serves_inside_a_with_block_and_is_gone_after_it(tmp_path: Path) -> None:
    with Mesh(write_pipeline(tmp_path)) as mesh:
        started = children()
        assert mesh.is_alive() and len(started) >= 4
        frames = list(mesh.generate("a wish", sampling={"writer": {"max_tokens": 3}}, request_id="mine"))
        assert sum(len(frame.token_ids) for frame in frames if isinstance(frame, TextDelta)) == 3
        assert any(isinstance(frame, Image) for frame in frames) and isinstance(frames[-1], Finished)
        assert mesh.abort("mine")[0].outcome == "unknown"
        painter = mesh.get_stage_metadata("painter")
        assert (painter.stage_type, painter.output_modality, painter.ready_replicas) == ("diffusion", "image", 1)
        with pytest.raises(NotFound, match="has no stage 'printer'; it has writer, painter"):
            mesh.get_stage_metadata("printer")
        answers = mesh.collective_call("check_health", stages=["writer"])
        assert [(answer.stage, answer.replica_id) for answer in answers] == [("writer", 0)]
    assert not mesh.is_alive()
    mesh.shutdown()
    assert_all_gone(started, tmp_path)


async def test_R20_a_mesh_serves_an_event_loop(tmp_path: Path) -> None:
    async with AsyncMesh(write_pipeline(tmp_path), stage_overrides=None) as mesh:
        started = children()
        frames = [frame async for frame in mesh.generate("a wish")]
        assert isinstance(frames[-1], Finished)
        assert (await mesh.get_stage_metadata("writer")).stage_type == "llm"
        assert (await mesh.abort("gone"))[0].outcome == "unknown"
    assert_all_gone(started, tmp_path)


def test_R20_a_start_that_fails_raises_the_stages_own_error_and_leaves_nothing(tmp_path: Path) -> None:
    wrong = "name: wrong\nstages:\n  - {{name: writer, engine: synthetic, engine_args: {{tokens_per_secnd: 3}}}}\n"
    with pytest.raises(StartFailed, match="did you mean tokens_per_second"):
        Mesh(write_pipeline(tmp_path, text=wrong)).start()
    assert children() == []
    assert_all_gone([], tmp_path)


def test_a_wrong_file_raises_the_heads_own_error(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"^the head cannot start: .*unknown key; did you mean stage_type\?$"):
        Mesh(write_pipeline(tmp_path, text="stages:\n  - {{name: writer, stage_typ: llm}}\n")).start()
    assert children() == []


def test_a_mesh_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    mesh = Mesh(write_pipeline(tmp_path))
    starting = threading.Thread(target=mesh.start)
    starting.start()
    starting.join(READY_S)
    try:
        assert isinstance(list(mesh.generate("a wish"))[-1], Finished)
        assert mesh.is_alive()
    finally:
        mesh.shutdown()


def test_R20_nothing_outlives_a_program_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time, stagemesh\n"
        f"mesh = stagemesh.Mesh({str(write_pipeline(tmp_path))!r}).start()\n"
        "print('ready', flush=True)\n"
        "time.sleep(300)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment(tmp_path)
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        everyone = family(process.pid)
        assert len(everyone) >= 5
    finally:
        process.kill()
        process.wait(READY_S)
    assert_all_gone(everyone, tmp_path)


def test_a_program_that_forgets_to_shut_down_leaves_nothing(tmp_path: Path) -> None:
    program = (
        "import psutil, stagemesh\n"
        f"mesh = stagemesh.Mesh({str(write_pipeline(tmp_path))!r}).start()\n"
        "print(*[p.pid for p in psutil.Process().children(recursive=True)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(tmp_path), timeout=READY_S
    )
    assert done.returncode == 0, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) >= 4
    eventually("none of them is left", lambda: not any(_exists(pid) for pid in pids), 15)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

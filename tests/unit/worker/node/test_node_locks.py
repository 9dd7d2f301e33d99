"""Device locks: one agent at a time, also after the other one was killed."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stagemesh.v1 import device_pb2 as device_pb
from stagemesh_worker.node import locks
from stagemesh_worker.node.locks import DeviceBusy, DeviceLocks

HOLDER = """
import asyncio, subprocess, sys
from pathlib import Path
from stagemesh.v1 import device_pb2
from stagemesh_worker.node.locks import DeviceLocks

async def main():
    own = DeviceLocks(Path(sys.argv[1]))
    names = await own.acquire([device_pb2.Device(id="cpu:0", kind=1, cores=[0, 1])], 5)
    child = subprocess.Popen(["sleep", "60"], pass_fds=own.descriptors(names))
    own.note_replica(names, "writer/0", child.pid)
    print(child.pid, flush=True)
    sys.stdin.read()
    child.kill()
    child.wait()

asyncio.run(main())
"""


def cpu(number: int, *cores: int) -> device_pb.Device:
    return device_pb.Device(id=f"cpu:{number}", kind=device_pb.DEVICE_KIND_CPU, cores=cores)


def hold(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """Another agent with a replica on cores 0 and 1; its process, and the replica's id."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


async def test_a_device_of_another_agent_is_refused_with_its_holder(tmp_path: Path) -> None:
    other, replica = hold(tmp_path)
    waited: list[str] = []
    try:
        with pytest.raises(DeviceBusy) as refusal:
            await DeviceLocks(tmp_path).acquire([cpu(1, 1, 2)], 0.3, waited.append)
        holder = f"cpu:1, which process {replica} (writer/0 of node agent {other.pid}) has"
        assert str(refusal.value).startswith(f"waited 0 s for {holder}")
        assert waited == [holder], "it is said once, and while it waits"
    finally:
        other.communicate("", timeout=10)


async def test_it_is_free_once_the_other_agent_is_done(tmp_path: Path) -> None:
    other, _ = hold(tmp_path)
    waits = asyncio.Event()
    ours = asyncio.create_task(DeviceLocks(tmp_path).acquire([cpu(0, 0)], 30, lambda holder: waits.set()))
    async with asyncio.timeout(10):
        await waits.wait()
    other.communicate("", timeout=10)
    async with asyncio.timeout(10):
        assert await ours == ("core-0",)


async def test_a_replica_of_a_killed_agent_still_holds_its_devices(tmp_path: Path) -> None:
    other, replica = hold(tmp_path)
    other.kill()
    other.wait(10)
    try:
        with pytest.raises(DeviceBusy, match=f"process {replica} "):
            await DeviceLocks(tmp_path).acquire([cpu(0, 0)], 0.2)
    finally:
        os.kill(replica, 9)
    names = await DeviceLocks(tmp_path).acquire([cpu(0, 0)], 10)
    assert names == ("core-0",)


async def test_replicas_of_one_agent_may_share_a_device_and_the_last_one_frees_it(tmp_path: Path) -> None:
    own, stranger = DeviceLocks(tmp_path), DeviceLocks(tmp_path)
    first = await own.acquire([cpu(0, 0)], 1)
    second = await own.acquire([cpu(0, 0)], 1)
    own.release(first)
    with pytest.raises(DeviceBusy):
        await stranger.acquire([cpu(0, 0)], 0.1)
    own.release(second)
    assert await stranger.acquire([cpu(0, 0)], 1) == first


async def test_a_wait_that_fails_gives_back_what_it_had(tmp_path: Path) -> None:
    own, stranger = DeviceLocks(tmp_path), DeviceLocks(tmp_path)
    await stranger.acquire([cpu(1, 1)], 1)
    with pytest.raises(DeviceBusy):
        await own.acquire([cpu(0, 0), cpu(1, 1)], 0.1)
    assert await stranger.acquire([cpu(0, 0)], 1) == ("core-0",)


async def test_a_wait_that_is_cancelled_leaves_nothing_locked(tmp_path: Path) -> None:
    own, stranger = DeviceLocks(tmp_path), DeviceLocks(tmp_path)
    held = await stranger.acquire([cpu(1, 1)], 1)
    waits = asyncio.Event()
    task = asyncio.create_task(own.acquire([cpu(0, 0), cpu(1, 1)], 30, lambda holder: waits.set()))
    await waits.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    stranger.release(held)
    assert await stranger.acquire([cpu(0, 0), cpu(1, 1)], 1) == ("core-0", "core-1")


def test_a_gpu_is_known_by_its_physical_id() -> None:
    gpu = device_pb.Device(id="cuda:0", kind=device_pb.DEVICE_KIND_CUDA, physical_id="MIG-1/2")
    assert locks.lock_names(gpu) == ["cuda-MIG-1-2"]
    assert locks.lock_names(cpu(0, 4, 5)) == ["core-4", "core-5"]


def test_the_directory_is_shared_by_all_users_and_may_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEMESH_LOCK_DIR", str(tmp_path / "a" / "b"))
    directory = DeviceLocks().directory
    assert directory == tmp_path / "a" / "b"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o1777


def test_a_directory_that_is_none_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STAGEMESH_LOCK_DIR", str(tmp_path / "file"))
    with pytest.raises(NotADirectoryError) as refusal:
        DeviceLocks()
    assert refusal.value.filename == str(tmp_path / "file")


async def test_a_directory_that_was_cleaned_away_is_made_anew(tmp_path: Path) -> None:
    own = DeviceLocks(tmp_path / "locks")
    (tmp_path / "locks").rmdir()
    assert await own.acquire([cpu(0, 0)], 1) == ("core-0",)


async def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "core-0.lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError) as refusal:
        await DeviceLocks(tmp_path).acquire([cpu(0, 0)], 1)
    assert refusal.value.errno == errno.ELOOP
    assert (tmp_path / "target").read_text() == "precious"


async def test_a_full_disk_takes_the_holders_name_and_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(locks.os, "pwrite", full)
    own, stranger = DeviceLocks(tmp_path), DeviceLocks(tmp_path)
    await own.acquire([cpu(0, 0)], 1)
    with pytest.raises(DeviceBusy, match="an unknown process has"):
        await stranger.acquire([cpu(0, 0)], 0.1)

"""Shared-memory segments: what a process leaves when it is killed is found and removed, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stagemesh.tensors import segments

MAKER = """
import sys
import numpy as np
from stagemesh.tensors import TensorStore

store = TensorStore(host_id="here", incarnation="one")
for size in (1 << 16, 1 << 20, 3 << 20):
    value = store.put("request", np.full(size, 7, np.uint8))
    print(value.ref.shared_memory, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def maker() -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    process = subprocess.Popen([sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    names = [process.stdout.readline().strip() for _ in range(3)]
    yield process, names
    process.kill()
    process.communicate(timeout=30)
    segments.sweep()


def test_segments_of_a_killed_process_are_swept(maker: tuple[subprocess.Popen[str], list[str]]) -> None:
    process, names = maker
    assert [Path("/dev/shm", name).stat().st_size for name in names] == [1 << 16, 1 << 20, 3 << 20]
    assert segments.names_of(process.pid) == sorted(names)
    process.kill()
    process.wait(timeout=30)
    assert set(names) <= set(segments.sweep())
    assert segments.names_of(process.pid) == []


def test_segments_of_a_zombie_are_swept(maker: tuple[subprocess.Popen[str], list[str]]) -> None:
    process, names = maker
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, but its parent has not asked
    assert set(names) <= set(segments.sweep())


def test_segments_of_a_living_process_are_not_swept(maker: tuple[subprocess.Popen[str], list[str]]) -> None:
    _, names = maker
    assert not set(names) & set(segments.sweep())
    mapping = segments.map_read_only(names[0], 1 << 16)
    assert np.all(np.frombuffer(mapping, np.uint8) == 7)


def test_a_segment_of_a_process_with_a_recycled_number_is_swept() -> None:
    name = segments.create(memoryview(b"bytes"))
    _, pid, start, namespace, random = name.split("-")
    earlier = f"stagemesh-{pid}-{int(start) - 1}-{namespace}-{random}"
    os.rename(Path("/dev/shm", name), Path("/dev/shm", earlier))
    assert earlier in segments.sweep()


def test_a_segment_of_another_pid_namespace_is_left_alone() -> None:
    name = segments.create(memoryview(b"bytes"))
    _, _, start, namespace, random = name.split("-")
    foreign = f"stagemesh-999999999-{start}-{int(namespace) + 1}-{random}"
    os.rename(Path("/dev/shm", name), Path("/dev/shm", foreign))
    try:
        assert foreign not in segments.sweep()
        assert Path("/dev/shm", foreign).exists()
    finally:
        segments.remove(foreign)


def test_a_file_that_is_not_ours_is_left_alone() -> None:
    other = Path("/dev/shm/stagemesh-notes")
    other.write_text("not a segment")
    try:
        assert other.name not in segments.sweep()
        assert other.exists()
    finally:
        other.unlink()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "psm_1234", "stagemesh-1-2-3-../../etc/pass"])
def test_a_name_from_the_wire_never_leads_elsewhere(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a shared-memory segment"):
        segments.map_read_only(name, 1)


def test_a_link_in_place_of_a_segment_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"private")
    name = segments.create(memoryview(b"bytes"))
    segments.remove(name)
    Path("/dev/shm", name).symlink_to(secret)
    try:
        with pytest.raises(OSError):
            segments.open_reader(name)
    finally:
        segments.remove(name)


def test_a_segment_shorter_than_promised_is_not_mapped() -> None:
    name = segments.create(memoryview(b"bytes"))
    try:
        with pytest.raises(ValueError, match="shorter"):
            segments.map_read_only(name, 4096)
    finally:
        segments.remove(name)


def test_a_mapping_outlives_its_name() -> None:
    name = segments.create(memoryview(b"x" * 8192))
    mapping = segments.map_read_only(name, 8192)
    segments.remove(name)
    assert mapping[:] == b"x" * 8192
    assert segments.names_of(os.getpid()) == []

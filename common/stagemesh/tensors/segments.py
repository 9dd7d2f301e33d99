"""POSIX shared-memory segments whose names tell who made them, so that those of the dead can be swept.

A segment is a file in /dev/shm named `stagemesh-<pid>-<start>-<pid namespace>-<random>`: the start time tells a process
from a later one with the same number, the namespace tells containers apart that share /dev/shm.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import re
import secrets
from pathlib import Path

DIRECTORY = Path("/dev/shm")
WRITE_BYTES = 1 << 20
"""Written at once: small enough for the cache, large enough to make the system call's own cost vanish."""

_NAME = re.compile(r"stagemesh-(\d+)-(\d+)-(\d+)-[0-9a-f]{16}")


def create(data: memoryview) -> str:
    """Make a segment of this process that holds `data`; returns its name.

    Raises:
        OSError: there is no shared memory, or not enough; nothing remains.
    """
    name = f"{_prefix(os.getpid())}-{secrets.token_hex(8)}"
    path = DIRECTORY / name
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        # write() and not a mapping: a full /dev/shm is then an error and not a SIGBUS, and it is faster, since the
        # kernel need not clear the pages first.
        position = 0
        while position < len(data):
            position += os.write(descriptor, data[position : position + WRITE_BYTES])
    except BaseException:
        remove(name)
        raise
    finally:
        os.close(descriptor)
    return name


def open_reader(name: str) -> int:
    """A descriptor to read the segment with, for the caller to close; it reads on when the name is removed.

    Raises:
        OSError: it is not there or belongs to another user.
        ValueError: that is not a segment's name.
    """
    return os.open(_path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def map_read_only(name: str, size: int) -> mmap.mmap:
    """Map `size` bytes of a segment; the mapping lives on when the name is removed.

    Raises:
        OSError, ValueError: as `open_reader`; ValueError when it is shorter.
    """
    descriptor = open_reader(name)
    try:
        if os.fstat(descriptor).st_size < size:
            raise ValueError(f"segment {name} is shorter than {size} bytes")
        # Pages come as they are touched, in the thread that computes with them: filling them in now would stall a loop.
        return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def remove(name: str) -> None:
    """Remove a segment's name; its memory is free once nobody maps it."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_path(name))


def sweep() -> list[str]:
    """Remove the segments of dead processes of this user and pid namespace; returns their names."""
    removed = []
    for name in _names():
        pid, start, namespace = _NAME.fullmatch(name).groups()  # type: ignore[union-attr]
        if int(namespace) != _namespace() or _start_ticks(int(pid)) == int(start):
            continue
        with contextlib.suppress(PermissionError):  # another user's
            remove(name)
            removed.append(name)
    return removed


def names_of(pid: int) -> list[str]:
    """Segments that process `pid` made and nobody removed."""
    return [name for name in _names() if name.startswith(f"stagemesh-{pid}-")]


def _names() -> list[str]:
    try:
        return sorted(name for name in os.listdir(DIRECTORY) if _NAME.fullmatch(name))
    except FileNotFoundError:
        return []


def _path(name: str) -> Path:
    # The name may come from another machine: it must not lead out of the directory.
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a shared-memory segment of ours")
    return DIRECTORY / name


@functools.lru_cache(maxsize=4)  # a forked child has a pid of its own
def _prefix(pid: int) -> str:
    return f"stagemesh-{pid}-{_start_ticks(pid)}-{_namespace()}"


def _start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot; -1 when there is none."""
    try:
        # The second field is the command in parentheses and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if fields[0] == "Z" else int(fields[19])


@functools.cache
def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0

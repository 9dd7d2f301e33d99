"""One lock per device on disk, so that two node agents on a host never use a device at once.

The lock is an flock(2) on a file. The descriptor is handed on to the replica process and what that forks, so that a
device counts as taken until the last process that may use it is gone, also when its agent was killed before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from stagemesh.v1 import device_pb2 as device_pb

DIRECTORY_VARIABLE = "STAGEMESH_LOCK_DIR"
POLL_S = 0.1
"""flock(2) waits without a time limit or not at all: so the second, again and again."""


class DeviceBusy(RuntimeError):
    """Another agent's process kept a device; the text names it."""


@dataclass(slots=True)
class _Held:
    descriptor: int
    users: int


class DeviceLocks:
    """The locks of this agent. A device stays locked as long as one of the agent's replicas has it."""

    def __init__(self, directory: Path | None = None) -> None:
        """
        Args:
            directory: the same for all agents of a host; found when None.

        Raises:
            OSError: it cannot be made or written.
        """
        self.directory = _usable(directory) if directory is not None else default_directory()
        self._held: dict[str, _Held] = {}

    async def acquire(
        self,
        devices: Iterable[device_pb.Device],
        timeout_s: float,
        on_wait: Callable[[str], None] = lambda holder: None,
    ) -> tuple[str, ...]:
        """Lock all `devices`, waiting up to `timeout_s` in all; returns the names for `release`.

        Args:
            on_wait: told who has the device that is waited for, whenever that changes.

        Raises:
            DeviceBusy: another process kept one; none of these locks is held then.
            OSError: the lock files cannot be used.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        taken: list[str] = []
        try:
            # In one order everywhere, so that two agents that want the same two devices cannot wait for each other.
            for name, device_id in sorted((name, device.id) for device in devices for name in lock_names(device)):
                await self._acquire(name, device_id, deadline, timeout_s, on_wait)
                taken.append(name)
        except BaseException:
            self.release(taken)
            raise
        return tuple(taken)

    def descriptors(self, names: Iterable[str]) -> list[int]:
        """Descriptors that hold these locks, for a child process to inherit."""
        return [self._held[name].descriptor for name in names]

    def note_replica(self, names: Iterable[str], replica: str, pid: int) -> None:
        """Write beside the locks which process has them now: whoever waits reads it."""
        for name in names:
            _write_holder(self._held[name].descriptor, {"agent": os.getpid(), "pid": pid, "replica": replica})

    def release(self, names: Iterable[str]) -> None:
        """Give up one use of each lock."""
        for name in names:
            held = self._held[name]
            held.users -= 1
            if held.users == 0:
                del self._held[name]
                # No LOCK_UN: that would free it for a process that inherited it, too.
                os.close(held.descriptor)

    async def _acquire(
        self, name: str, device_id: str, deadline: float, timeout_s: float, on_wait: Callable[[str], None]
    ) -> None:
        path = self.directory / f"{name}.lock"
        descriptor, said = -1, ""
        try:
            while True:
                # Looked up at every turn: another replica of this agent may have got it meanwhile.
                if (held := self._held.get(name)) is not None:
                    held.users += 1
                    return
                if descriptor < 0:
                    _usable(self.directory)  # whoever cleans temporary files may have taken it
                    descriptor = _open(path)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    pass
                holder = f"{device_id}, which {_read_holder(descriptor)} has"
                if asyncio.get_running_loop().time() >= deadline:
                    raise DeviceBusy(f"waited {timeout_s:.0f} s for {holder} (lock file {path})")
                if holder != said:
                    said = holder
                    on_wait(holder)
                await asyncio.sleep(POLL_S)
            _write_holder(descriptor, {"agent": os.getpid(), "pid": os.getpid(), "replica": ""})
            self._held[name] = _Held(descriptor, 1)
            descriptor = -1
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def default_directory() -> Path:
    """Where all agents of this host keep their locks: one for all users, unless set.

    Raises:
        OSError: it cannot be used.
    """
    return _usable(Path(os.environ.get(DIRECTORY_VARIABLE) or Path(tempfile.gettempdir()) / "stagemesh-locks"))


def lock_names(device: device_pb.Device) -> list[str]:
    """What a device is made of on its host, as file names: its cores, or its physical id."""
    if device.kind == device_pb.DEVICE_KIND_CPU:
        return [f"core-{core}" for core in device.cores]
    return [re.sub(r"[^A-Za-z0-9]+", "-", f"{device.id.partition(':')[0]}-{device.physical_id or device.id}")]


def _usable(directory: Path) -> Path:
    """Make `directory` as /tmp is: agents of several users share it, and none removes another's files."""
    try:
        directory.mkdir(parents=True)
        directory.chmod(0o1777)
    except FileExistsError:
        pass
    if not stat.S_ISDIR(directory.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is no directory", str(directory))
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(
            errno.EACCES,
            f"cannot be written (all agents of this host share it; {DIRECTORY_VARIABLE} names another)",
            str(directory),
        )
    return directory


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        # Without O_CREAT first: in a sticky directory the kernel may refuse it for a file of another user.
        return os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        with contextlib.suppress(PermissionError):  # somebody else made it at the same moment
            os.fchmod(descriptor, 0o666)  # whatever the umask: agents of other users lock it too
        return descriptor


def _write_holder(descriptor: int, record: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # a full disk takes the name, not the lock
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(record).encode(), 0)


def _read_holder(descriptor: int) -> str:
    try:
        record = json.loads(os.pread(descriptor, 1024, 0))
        pid, agent, replica = int(record["pid"]), int(record["agent"]), str(record["replica"])
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown process"
    if not replica:
        return f"node agent {agent}"
    return f"process {pid} ({replica} of node agent {agent})"

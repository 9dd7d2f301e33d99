"""One private directory per process for its sockets, gone with the process.

It lies at `$XDG_RUNTIME_DIR/stagemesh-<uid>/<pid>-<random>/`, or under /tmp: also where that path is too long for a
socket, which some engines only say by crashing. Its owner holds a lock on the file `lock`
in it, so that a sweep tells a dead owner's directory from a living one's in any pid namespace.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import tempfile
import uuid
from pathlib import Path

_LOCK = "lock"
MAX_SOCKET_CHARS = 107
"""Of a Unix socket's path, on Linux."""
_BELOW_ROOT = len(f"/{2**22}-{'0' * 8}/{uuid.UUID(int=0)}")
"""The longest path from the root to a socket: a process's directory, and a name as vLLM makes them."""
_SHORT = Path("/tmp")
_own: Path | None = None
_own_pid = 0
_own_lock = -1


def run_root() -> Path:
    """The user's directory of run directories, made with mode 0700; short enough for sockets below it.

    Raises:
        PermissionError: somebody else owns it.
    """
    name = f"stagemesh-{os.getuid()}"
    root = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / name
    if len(os.fsencode(root)) + _BELOW_ROOT > MAX_SOCKET_CHARS:
        root = _SHORT / name
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root}: belongs to another user: set XDG_RUNTIME_DIR to a directory of your own")
    return root


def run_directory() -> Path:
    """This process's own run directory, made at the first call and removed at exit."""
    global _own, _own_pid, _own_lock
    if _own is None or _own_pid != os.getpid():
        root = run_root()
        final = root / f"{os.getpid()}-{secrets.token_hex(4)}"
        # It gets its name only once it is locked, so that no sweep takes it in between.
        unlocked = root / f".{final.name}"
        unlocked.mkdir(mode=0o700)
        _own_lock = os.open(unlocked / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(_own_lock, fcntl.LOCK_EX)
        unlocked.rename(final)
        _own, _own_pid = final, os.getpid()
        atexit.register(remove_run_directory)
    return _own


def remove_run_directory() -> None:
    """Remove what `run_directory` made in this process; also twice, and harmless in a forked child."""
    global _own
    if _own is not None and _own_pid == os.getpid():
        shutil.rmtree(_own, ignore_errors=True)
        os.close(_own_lock)
        _own = None


def sweep_run_directories() -> list[Path]:
    """Remove the directories whose owner is dead; returns them."""
    removed: list[Path] = []
    for directory in run_root().iterdir():
        if directory.name.startswith(".") or not directory.is_dir():
            continue
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # its owner removes it right now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
        finally:
            os.close(lock)
    return removed

"""A tiny disk under one folder of one process, which a test fills and frees."""

from __future__ import annotations

import errno
import functools
import itertools
import subprocess
from pathlib import Path

TRY_S = 10.0


@functools.cache
def why_not() -> str:
    """Why there can be none here; empty when there can."""
    try:
        tried = subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
            capture_output=True, text=True, timeout=TRY_S, check=False,
        )  # fmt: skip
    except OSError as error:
        return f"no small disk: {error}"
    return f"no small disk: {tried.stderr.strip()}" if tried.returncode else ""


class SmallDisk:
    """64 KiB and 16 files at `folder`, in the mount namespace of a process that is started with `prefix`.

    Nobody else sees it, and it goes with the process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        mount = 'mkdir -p "$0" && mount -t tmpfs -o size=64k,nr_inodes=16 tmpfs "$0" && exec "$@"'
        self.prefix = ("unshare", "--mount", "sh", "-c", mount, str(folder))

    def fill(self, pid: int) -> None:
        """Leave no byte and no file to the process `pid`, which lives on it."""
        folder = self._seen_by(pid)
        try:
            with (folder / "rubbish").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
        for number in itertools.count():
            try:
                (folder / f"rubbish-{number}").touch()
            except OSError as error:
                assert error.errno == errno.ENOSPC, error
                return

    def free(self, pid: int) -> None:
        """Clear away what filled it."""
        for path in self._seen_by(pid).glob("rubbish*"):
            path.unlink()

    def _seen_by(self, pid: int) -> Path:
        return Path(f"/proc/{pid}/root{self._folder}")

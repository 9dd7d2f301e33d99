"""A wall clock of its own for the processes of one mesh, which a test steps while they run."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
COMPILE_S = 60.0


def why_not() -> str:
    """Why there can be none here; empty when there can."""
    return "" if shutil.which("cc") else "no C compiler (cc) for the library that shifts the clock"


class WallClock:
    """Processes started with `environment` read the date from it. The machine's own clock is left alone."""

    def __init__(self, folder: Path) -> None:
        library, self._file = folder / "wall_clock.so", folder / "wall_clock"
        command = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", str(SOURCE), "-o", str(library), "-ldl"]
        subprocess.run(command, check=True, timeout=COMPILE_S)
        self._shift = 0
        self._file.write_bytes(struct.pack("=q", 0))
        self.environment = {"LD_PRELOAD": str(library), "STAGEMESH_TEST_CLOCK": str(self._file)}

    def step(self, seconds: int) -> None:
        """Set it forward, or back; seen at once by all that run."""
        self._shift += seconds
        with self._file.open("r+b") as file:  # in place: they have mapped this very file
            file.write(struct.pack("=q", self._shift))
        read = int(subprocess.check_output(["date", "+%s"], env={**os.environ, **self.environment}, timeout=COMPILE_S))
        assert abs(read - time.time() - self._shift) < 5, "the date is not shifted"

    def is_read_by(self, pid: int) -> bool:
        """Whether a process has this clock."""
        return str(self._file) in Path(f"/proc/{pid}/maps").read_text()

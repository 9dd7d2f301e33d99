"""A file that says where a process serves, there only once it does: for scripts and parents that wait for it."""

from __future__ import annotations

import os
from pathlib import Path


def write_ready_file(path: Path, text: str) -> None:
    """Write one line to `path` so that a reader sees all of it or nothing. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(f"{text}\n")
    temporary.replace(path)

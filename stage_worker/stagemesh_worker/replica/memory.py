"""How much memory a replica takes, its engine's processes included."""

from __future__ import annotations

import psutil


def resident_bytes() -> int:
    """Resident memory of this process and its descendants; shared pages count in each."""
    process = psutil.Process()
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_info().rss
        except psutil.Error:
            continue  # it ended meanwhile
    return total

"""Removes what killed processes left behind: sockets in run directories, and segments in shared memory."""

from __future__ import annotations

import logging

from stagemesh.tensors import sweep_segments
from stagemesh_worker.rundir import sweep_run_directories

log = logging.getLogger(__name__)


def sweep() -> list[str]:
    """Remove what belongs to no living process; returns what it was. Living processes' things are not touched."""
    left: list[str] = []
    for one in (sweep_run_directories, sweep_segments):
        try:
            left += map(str, one())
        except OSError as error:
            log.warning("sweeping: %s", error)
    if left:
        log.info("removed what dead processes left: %s", ", ".join(left))
    return left

"""What a replica's life asks of whoever runs its process."""

from __future__ import annotations

from dataclasses import dataclass

from stagemesh_worker.replica import control


@dataclass(frozen=True, slots=True)
class Lock:
    """Take the locks of its devices; answer with `locked` or `lock_failed`."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Release:
    """Give the locks up, or stop waiting for them."""


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process; answer with `spawned` or `spawn_failed`, and once it is over with `ended`."""

    assign: control.Assign


@dataclass(frozen=True, slots=True)
class Tell:
    """Send the process a message."""

    message: control.Message


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send the process SIGTERM, which reaches also one that does not read its messages yet."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the process and all that it started."""


Order = Lock | Release | Spawn | Tell | Terminate | Kill

"""Why a replica ended, in words that lead to the cause: what happened first, then the engine's last lines."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from stagemesh.rpc.errors import MAX_MESSAGE_CHARS, MeshError, Reason
from stagemesh_worker.replica import control

MAX_FIRST_CHARS = 800
MAX_LINES = 20


def reported(message: control.Failed) -> MeshError:
    """The error behind a replica's own last word."""
    known = message.reason in Reason.__members__
    return MeshError(Reason(message.reason) if known else Reason.START_FAILED, message.message)


def unannounced(exit_code: int, *, has_served: bool) -> MeshError:
    """The error of a process that ended without a word. Exit codes are negative for signals."""
    if exit_code < 0:
        how = f"was killed by {_signal_name(-exit_code)}"
        if exit_code == -signal.SIGKILL:
            how += " (out of memory, perhaps)"
    else:
        how = f"ended with status {exit_code}"
    reason = Reason.REPLICA_LOST if has_served else Reason.START_FAILED
    return MeshError(reason, f"the replica process {how}")


def with_lines(error: MeshError, lines: Iterable[str], verdict: str = "") -> MeshError:
    """`error` with the process's last lines of output below its own text, as many as an error may hold.

    Args:
        verdict: what follows from it, in a few words.
    """
    first = " ".join(error.message.split())
    if len(first) > MAX_FIRST_CHARS:
        first = first[: MAX_FIRST_CHARS - 3] + "..."
    if verdict:
        first += f" ({verdict})"
    room = MAX_MESSAGE_CHARS - len(first)
    kept: list[str] = []
    for line in [line.rstrip() for line in lines if line.strip()][: -MAX_LINES - 1 : -1]:
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    text = "\n".join([first, *reversed(kept)])
    return MeshError(error.reason, text, retry_delay_s=error.retry_delay_s, **error.metadata)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""Why a replica ended, in words that lead to the cause: what happened first, then the engine's last lines."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence

from stagemesh.rpc.errors import MAX_MESSAGE_CHARS, MeshError, Reason
from stagemesh_worker.replica import control

MAX_FIRST_CHARS = 800
MAX_LINES = 20
MAX_CAUSE_CHARS = 400

_EXCEPTION = re.compile(r"(?:.*\] )?((?:\w+\.)*[A-Z]\w*(?:Error|Exception): .+)")
"""The last line of a traceback, as it is or in a log line."""


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

    An exception that came before that of `error`, such as an engine's in a process of its own, stands above them.

    Args:
        verdict: what follows from it, in a few words.
    """
    first = " ".join(error.message.split())
    if len(first) > MAX_FIRST_CHARS:
        first = first[: MAX_FIRST_CHARS - 3] + "..."
    if verdict:
        first += f" ({verdict})"
    told = [line.rstrip() for line in lines if line.strip()]
    cause = _cause(told, first)
    kept = _last(told, MAX_MESSAGE_CHARS - len(first) - len(cause) - 1)
    if cause and not any(cause in line for line in kept):
        kept.insert(0, cause)
    text = "\n".join([first, *kept])
    return MeshError(error.reason, text, retry_delay_s=error.retry_delay_s, **error.metadata)


def _cause(lines: Sequence[str], known: str) -> str:
    """The last exception that `known` does not tell already; empty: there is none."""
    for line in reversed(lines):
        found = _EXCEPTION.fullmatch(line)
        if found and found[1] not in known:
            return found[1][:MAX_CAUSE_CHARS]
    return ""


def _last(lines: Sequence[str], room: int) -> list[str]:
    """The last lines, up to `MAX_LINES` and for so many characters."""
    kept: list[str] = []
    for line in lines[: -MAX_LINES - 1 : -1]:
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    return kept[::-1]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""How the command ends: one readable line with a hint, and an exit status whose band says whose turn it is.

0          done
1          an error inside StageMesh (with a traceback: please report it)
2          wrong usage of the command
10 to 19   what was given is wrong: fix it
20 to 29   the mesh cannot do it now: wait, or look at it
130        interrupted
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagemesh.client.errors import StageMeshError

CONFIG, INVALID, NOT_FOUND, ACCESS = 10, 11, 12, 13
UNREACHABLE, UNAVAILABLE, OVERLOADED, TIMEOUT, FAILED, NOT_STARTED, ABORTED = 20, 21, 22, 23, 24, 25, 26
INTERRUPTED = 130

EXIT_CODES: dict[int, str] = {
    0: "done",
    1: "an error inside StageMesh",
    2: "wrong usage of the command",
    CONFIG: "a pipeline file, a setting or a path is wrong",
    INVALID: "the request is wrong",
    NOT_FOUND: "there is no such pipeline, stage, replica or node",
    ACCESS: "a token or certificate is missing, wrong, or not allowed to do this",
    UNREACHABLE: "no head answers",
    UNAVAILABLE: "no replica can serve it now",
    OVERLOADED: "the mesh is at its limit",
    TIMEOUT: "it did not end in time",
    FAILED: "a stage failed, or was lost",
    NOT_STARTED: "the mesh or a stage could not start",
    ABORTED: "somebody aborted the request",
    INTERRUPTED: "interrupted",
}
"""Exit status -> meaning; the reference page shows it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What to print, and the exit status."""

    code: int
    message: str
    hint: str = ""
    details: tuple[str, ...] = ()
    """Lines that help to find out more, oldest first."""


def ending_of(error: Exception) -> Ending | None:
    """How to end on `error`; None for what a user cannot have caused."""
    # Looked up rather than imported: what was never loaded cannot have raised.
    config = sys.modules.get("stagemesh.config")
    if config is not None and isinstance(error, config.ConfigError):
        return Ending(CONFIG, str(error))
    security = sys.modules.get("stagemesh.rpc.security")
    if security is not None and isinstance(error, security.SecurityError):
        return Ending(CONFIG, str(error))
    errors = sys.modules.get("stagemesh.rpc.errors")
    if errors is not None and isinstance(error, errors.MeshError):
        from stagemesh.client.errors import typed

        return _mesh_ending(typed(error))
    if isinstance(error, FileExistsError) and error.filename is None:
        return Ending(CONFIG, str(error))
    if isinstance(error, OSError) and error.filename is not None:
        return Ending(CONFIG, f"{error.filename}: {error.strerror}")
    return None


def _mesh_ending(error: StageMeshError) -> Ending:
    from stagemesh.client import errors

    message = str(error)
    match error:
        case errors.Unreachable():
            hint = "start one with `stagemesh up PIPELINE`, or say where it is with --head HOST:PORT or STAGEMESH_HEAD"
            return Ending(UNREACHABLE, message, hint)
        case errors.Unavailable():
            return Ending(UNAVAILABLE, message, "`stagemesh status` shows what is missing, and why")
        case errors.Overloaded():
            return Ending(OVERLOADED, message, f"try again in {error.retry_after_s:g} s")
        case errors.InvalidRequest() | errors.Unsupported() | errors.AlreadyRunning():
            return Ending(INVALID, message)
        case errors.NotFound():
            return Ending(NOT_FOUND, message, "`stagemesh status` lists pipelines, stages, replicas and nodes")
        case errors.AccessDenied():
            return Ending(ACCESS, message, "present a token of the right role with --token-file")
        case errors.RequestTimeout():
            return Ending(TIMEOUT, message, "--timeout SECONDS allows more")
        case errors.RequestAborted():
            return Ending(ABORTED, message)
        case errors.StartFailed():
            return Ending(NOT_STARTED, message, details=error.details)
    return Ending(FAILED, message)

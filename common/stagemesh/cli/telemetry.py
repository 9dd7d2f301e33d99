"""The options of logs, the same on every command that runs a process of the mesh."""

from __future__ import annotations

from typing import Annotated

import typer

from stagemesh.telemetry.logs import JSON_VARIABLE, LEVEL_VARIABLE, LogOutput, set_up_logging

_PANEL = "Logs"

LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        envvar=LEVEL_VARIABLE,
        help="debug, info, warning or error.",
        rich_help_panel=_PANEL,
    ),
]
LogJson = Annotated[
    bool,
    typer.Option(
        "--log-json",
        envvar=JSON_VARIABLE,
        help="Log a JSON object a line, with stage, replica and request.",
        rich_help_panel=_PANEL,
    ),
]


def start_logging(component: str, level: str, as_json: bool) -> LogOutput:
    """Log to standard error, and have child processes do the same. Raises BadParameter for a level that is none."""
    try:
        return set_up_logging(component, level=level, as_json=as_json)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--log-level") from error


def log_arguments(level: str, as_json: bool) -> list[str]:
    """The options again, for a command that is started as a child."""
    return ["--log-level", level, *(["--log-json"] if as_json else [])]

"""The options of logs and traces, the same on every command that runs a process of the mesh."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from stagemesh.telemetry.logs import JSON_VARIABLE, LEVEL_VARIABLE, LogOutput, set_up_logging

_PANEL = "Logs and traces"

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
OtlpEndpoint = Annotated[
    str,
    typer.Option(
        "--otlp-endpoint",
        metavar="URL",
        help="Send traces to this OTLP collector, such as http://127.0.0.1:4317. [dim]\\[env: OTEL_EXPORTER_OTLP_*][/]",
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


def ask_for_traces(endpoint: str) -> None:
    """Have this process and its children send traces where the option or the environment says.

    Raises:
        BadParameter: they were asked for and cannot be had.
    """
    if not endpoint and not any(name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ):
        return  # without an import of gRPC
    from stagemesh.telemetry import tracing

    if endpoint:
        tracing.ask_for_traces(endpoint)
    try:
        tracing.check_tracing()
    except tracing.TracingError as error:
        raise typer.BadParameter(str(error), param_hint="--otlp-endpoint") from error


def trace_arguments(endpoint: str) -> list[str]:
    """The option again, for a command that is started as a child."""
    return ["--otlp-endpoint", endpoint] if endpoint else []

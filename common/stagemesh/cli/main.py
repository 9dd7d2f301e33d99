"""The `stagemesh` command: puts the commands together, and ends each in a readable way."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points

import typer

from stagemesh.cli.exits import INTERRUPTED, Ending, ending_of

COMMANDS = ("up", "generate", "status", "top", "drain", "scale", "events", "health", "config", "certs")
"""Modules of this package with a `register(app)`, in the order that --help shows."""
ENTRY_POINTS = "stagemesh.commands"
"""Where other packages, such as head and worker, bring theirs."""

app = typer.Typer(
    name="stagemesh",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Serve generative pipelines of several models as a mesh of gRPC services.

    Start a whole mesh on this machine, and use it:

      [bold]stagemesh up[/] examples/shapes/pipeline.yaml
      [bold]stagemesh generate[/] "a red circle at night" --out out
      [bold]stagemesh status[/]

    Or one process a machine:

      [bold]stagemesh head[/] pipeline.yaml --listen 10.0.0.1:8470
      [bold]stagemesh worker[/] --head 10.0.0.1:8470 --stage painter
    """,
)


def build() -> typer.Typer:
    """The app with all commands that are installed."""
    if not app.registered_commands:
        app.command()(version)
        for name in COMMANDS:
            importlib.import_module(f"stagemesh.cli.{name}").register(app)
        for entry_point in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
            try:
                entry_point.load()(app)
            except ImportError as error:
                app.command(entry_point.name)(_not_installed(entry_point.name, error))
    return app


def _not_installed(name: str, error: ImportError) -> Callable[[], None]:
    """A command in the place of one whose packages are not installed: a client-only machine has neither side."""

    def command() -> None:
        raise typer.BadParameter(f"this machine lacks a package of it ({error}): pip install 'stagemesh[{name}]'")

    command.__doc__ = f"Not installed here: pip install 'stagemesh\\[{name}]'."
    return command


def version() -> None:
    """Print the version."""
    from stagemesh import __version__

    print(__version__)


def run() -> None:
    """Run the command and exit."""
    try:
        build()()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has had enough. Python's own flush at exit must not stumble over it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        ending: Ending | None = ending_of(error)
        if ending is None:
            raise
        from stagemesh.cli.terminal import show

        show(ending)
        sys.exit(ending.code)


if __name__ == "__main__":
    run()

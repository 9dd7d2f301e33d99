"""The two consoles of the command, and small forms of figures."""

from __future__ import annotations

import sys
from functools import cache

from rich.console import Console

from stagemesh.cli.exits import Ending

PIPED_WIDTH = 200
"""Columns when the output goes to a file or a pipe: tables are cut at 80 otherwise."""


@cache
def out() -> Console:
    """For results."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, soft_wrap=False)


@cache
def err() -> Console:
    """For everything else."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else PIPED_WIDTH, highlight=False)


def show(ending: Ending) -> None:
    """Print how the command ends."""
    for line in ending.details:
        err().print(f"  {line}", style="dim", markup=False, soft_wrap=True)
    err().print("[bold red]error:[/] ", end="")
    err().print(ending.message, markup=False, soft_wrap=True)
    if ending.hint:
        err().print("[bold]hint:[/] ", end="")
        err().print(ending.hint, markup=False, soft_wrap=True)


def seconds(value: float) -> str:
    """A duration with a unit that fits: "3 ms", "1.25 s", "2 min 5 s"."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.2f} s"
    return f"{int(value // 60)} min {int(value % 60)} s"


def mebibytes(value: int) -> str:
    """A size in MiB."""
    return f"{value / 2**20:,.0f} MiB"

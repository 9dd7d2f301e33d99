"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from stagemesh.addresses import HEAD_VARIABLE

HeadOption = Annotated[
    str,
    typer.Option("--head", metavar="HOST:PORT", envvar=HEAD_VARIABLE, help="Where the head is."),
]
PipelineOption = Annotated[
    str, typer.Option("--pipeline", metavar="NAME", help="Pipeline; not needed when the head serves just one.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

"""The options that lay values over a pipeline file: written once, taken by `up`, `head` and `render` alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_PANEL = "Configuration"

StageOverrides = Annotated[
    str,
    typer.Option(
        "--stage-overrides",
        metavar="JSON",
        help='Values over those of the file, by stage id or name: \'{"painter": {"runtime": {"num_replicas": 2}}}\'.',
        rich_help_panel=_PANEL,
    ),
]
DeployConfig = Annotated[
    list[Path] | None,
    typer.Option(
        "--deploy-config",
        metavar="FILE",
        help="Deploy overlay on the pipeline file; repeat for several, the last one wins.",
        rich_help_panel=_PANEL,
    ),
]
EngineArg = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-arg",
        metavar="KEY=VALUE",
        help="Engine argument for all stages whose file does not set it, such as gpu_memory_utilization=0.5.",
        rich_help_panel=_PANEL,
    ),
]
StageInitTimeout = Annotated[
    float | None,
    typer.Option(
        "--stage-init-timeout",
        min=0.001,
        metavar="SECONDS",
        help="Time that a replica has to become ready, over the files', where 300 is the default.",
        rich_help_panel=_PANEL,
    ),
]
DefaultSampling = Annotated[
    str,
    typer.Option(
        "--default-sampling-params",
        metavar="JSON",
        help='Without files, for --model: what requests leave unset, by stage: \'{"0": {"max_tokens": 64}}\'.',
        rich_help_panel=_PANEL,
    ),
]
Platform = Annotated[
    str,
    typer.Option(
        "--platform",
        metavar="NAME",
        help="Section of deploy overlays to use: cuda, rocm, npu, xpu, cpu. Their common part alone by default.",
        rich_help_panel=_PANEL,
    ),
]

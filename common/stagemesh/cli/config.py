"""`stagemesh validate`, `render` and `schema`: what a pipeline file says, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.cli.exits import CONFIG
from stagemesh.cli.layering import DeployConfig, EngineArg, Platform, StageOverrides

if TYPE_CHECKING:
    from stagemesh.config import Layers

NodeDevices = Annotated[
    list[str] | None,
    typer.Option(
        "--devices",
        metavar="ID[=SIZE],...",
        help="Devices of a node, such as cuda:0=80GiB,cuda:1=80GiB or cpu:0,cpu:1: which replica gets which, and "
        "whether their memory suffices.",
    ),
]
ModelDefault = Annotated[
    str, typer.Option("--model", metavar="MODEL", help="Folder or name of the model for stages that name none.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the one app."""
    app.command()(validate)
    app.command()(render)
    app.command()(schema)


def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Pipeline files.", show_default=False)],
    stage_overrides: StageOverrides = "",
    deploy_config: DeployConfig = None,
    engine_arg: EngineArg = None,
    platform: Platform = "",
    model: ModelDefault = "",
    devices: NodeDevices = None,
) -> None:
    """Check pipeline files without starting anything.

      [bold]stagemesh validate[/] pipelines/*.yaml

      [bold]stagemesh validate[/] pipeline.yaml --devices cuda:0=80GiB,cuda:1=80GiB

    Says of each file the first thing that is wrong: file, line, path, value, and what would be right.
    """
    from stagemesh.config.commands import parse_node, validate_file

    node = parse_node(devices) if devices else None
    layers = _layers(stage_overrides, deploy_config, engine_arg, platform, model)
    verdicts = [validate_file(file, node, **layers) for file in files]
    for verdict in verdicts:
        _warn(verdict.warnings)
        typer.echo(f"{'good ' if verdict.is_good else 'wrong'}   {verdict.text}", err=not verdict.is_good)
    if not all(verdict.is_good for verdict in verdicts):
        raise typer.Exit(CONFIG)


def render(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A pipeline file.", show_default=False)],
    stage_overrides: StageOverrides = "",
    deploy_config: DeployConfig = None,
    engine_arg: EngineArg = None,
    platform: Platform = "",
    model: ModelDefault = "",
    devices: NodeDevices = None,
    origins: Annotated[bool, typer.Option(help="Say where each value came from.")] = True,
) -> None:
    """Print the fully resolved pipeline, the origin of each value, and the devices that its replicas get.

      [bold]stagemesh render[/] pipeline.yaml --stage-overrides '{"painter": {"runtime": {"num_replicas": 2}}}'

      [bold]stagemesh render[/] pipeline.yaml --devices cpu:0,cpu:1

    The output is a pipeline file again.
    """
    from stagemesh.config.commands import parse_node, render_file

    text, warnings = render_file(
        file,
        parse_node(devices) if devices else None,
        origins=origins,
        **_layers(stage_overrides, deploy_config, engine_arg, platform, model),
    )
    _warn(warnings)
    typer.echo(text, nl=False)


def schema(
    form: Annotated[
        str,
        typer.Argument(metavar="[FORM]", help="pipeline, overlay (of a deployment), or stage (as workers get it)."),
    ] = "pipeline",
) -> None:
    """Print the JSON schema of pipeline files, for editors.

    [bold]stagemesh schema[/] > stagemesh.schema.json
    """
    from stagemesh.config.commands import schema_text

    typer.echo(schema_text(form))


def _layers(
    stage_overrides: str, overlays: Sequence[Path] | None, engine_arg: Sequence[str] | None, platform: str, model: str
) -> Layers:
    from stagemesh.config.overrides import parse_engine_args, parse_stage_overrides

    return {
        "overlays": overlays,
        "stage_overrides": parse_stage_overrides(stage_overrides) if stage_overrides else None,
        "engine_args": parse_engine_args(engine_arg or ()),
        "platform": platform,
        "model": model,
    }


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        typer.echo(f"warning {warning}", err=True)

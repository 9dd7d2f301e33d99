"""`stagemesh validate`, `render` and `schema`: what a pipeline file says, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from stagemesh.cli.layering import DeployConfig, EngineArg, Platform, StageOverrides


def register(app: typer.Typer) -> None:
    """Add the commands to the one app."""
    app.command()(validate)
    app.command()(render)
    app.command()(schema)


def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Pipeline files.", show_default=False)],
) -> None:
    """Check pipeline files without starting anything.

      [bold]stagemesh validate[/] pipelines/*.yaml

    Says what is wrong with the first thing that is wrong in each: file, line, path, value, and what would be right.
    """
    from stagemesh.config import ConfigError, load

    wrong = 0
    for file in files:
        try:
            loaded = load(file)
        except ConfigError as error:
            wrong += 1
            typer.echo(f"wrong   {error}", err=True)
            continue
        for warning in loaded.warnings:
            typer.echo(f"warning {warning}", err=True)
        names = ", ".join(stage.name for stage in loaded.pipeline.stages)
        typer.echo(f"good    {file}: {loaded.pipeline.name} ({names}), revision {loaded.pipeline.revision}")
    if wrong:
        raise typer.Exit(1)


def render(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A pipeline file.", show_default=False)],
    stage_overrides: StageOverrides = "",
    deploy_config: DeployConfig = None,
    engine_arg: EngineArg = None,
    platform: Platform = "",
    origins: Annotated[bool, typer.Option(help="Say where each value came from.")] = True,
) -> None:
    """Print the fully resolved pipeline, with the origin of each value.

      [bold]stagemesh render[/] pipeline.yaml --stage-overrides '{"painter": {"runtime": {"num_replicas": 2}}}'

    The output is a pipeline file again.
    """
    from stagemesh.config import load
    from stagemesh.config.overrides import parse_engine_args, parse_stage_overrides
    from stagemesh.config.render import render as to_yaml
    from stagemesh.config.render import render_layout

    loaded = load(
        file,
        overlays=deploy_config or (),
        stage_overrides=parse_stage_overrides(stage_overrides) if stage_overrides else None,
        engine_args=parse_engine_args(engine_arg or []),
        platform=platform,
    )
    for warning in loaded.warnings:
        typer.echo(f"warning {warning}", err=True)
    typer.echo(to_yaml(loaded, origins=origins) + render_layout(loaded.pipeline), nl=False)


def schema(
    stage: Annotated[
        bool, typer.Option("--stage", help="Of one resolved stage, as it travels to workers, not of a file.")
    ] = False,
) -> None:
    """Print the JSON schema of pipeline files, for editors.

    [bold]stagemesh schema[/] > stagemesh.schema.json
    """
    from stagemesh.config.schema import pipeline_schema, stage_schema

    typer.echo(json.dumps(stage_schema() if stage else pipeline_schema(), indent=2))

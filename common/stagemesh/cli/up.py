"""`stagemesh up`: a whole mesh on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagemesh.addresses import DEFAULT_HEAD
from stagemesh.cli.security import with_security


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(up)


@with_security(serves=True)
def up(
    pipelines: Annotated[
        list[Path] | None, typer.Argument(metavar="[PIPELINE]...", help="Pipeline files; not with --model.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="A model's folder: serve it as a pipeline of one stage."),
    ] = None,
    stages: Annotated[
        str,
        typer.Option(metavar="LIST", help="Run only these stages here, by id or name: 0,2. Other nodes take the rest."),
    ] = "",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the head listens; port 0 picks one.")
    ] = DEFAULT_HEAD,
    stage_overrides: Annotated[
        str,
        typer.Option(metavar="JSON", help='Values over those of the file: \'{"painter": {"runtime": {...}}}\'.'),
    ] = "",
    deploy_config: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Overlay on the pipeline file; may be given often.")
    ] = None,
    devices: Annotated[
        str, typer.Option(metavar="LIST", help="Devices to use: cuda:0,cuda:1 or cpu:0; else all there are.")
    ] = "",
    cores_per_device: Annotated[
        int, typer.Option(min=0, metavar="N", help="Without accelerators: cores a device; 0: chosen.")
    ] = 0,
    init_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time for all stages to become ready.")
    ] = 600.0,
    drain_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time that running requests have at the end.")
    ] = 30.0,
    logs: Annotated[bool, typer.Option("--logs", help="Show the log lines of all processes.")] = False,
    ready_file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Written with HOST:PORT once everything is ready.")
    ] = None,
) -> None:
    """Start a head and a node on this machine, wait until every stage is ready, and serve until Ctrl-C.

      [bold]stagemesh up[/] examples/shapes/pipeline.yaml

      [bold]stagemesh up[/] --model /models/my-llm

    Run some stages here and wait for other machines to take the rest:

      [bold]stagemesh up[/] pipeline.yaml --stages 0 --listen 10.0.0.1:8470 --insecure

    Ctrl-C lets running requests finish; a second Ctrl-C stops at once.
    """
    from stagemesh.cli.running import UpSession
    from stagemesh.launch.local import LocalMesh

    if bool(pipelines) == (model is not None):
        raise typer.BadParameter("give pipeline files, or --model DIR", param_hint="PIPELINE")
    head = [*map(str, pipelines or ()), "--listen", listen, "--drain-timeout", f"{drain_timeout:g}"]
    head += ["--model", str(model)] if model else []
    head += ["--stage-overrides", stage_overrides] if stage_overrides else []
    head += [word for path in deploy_config or () for word in ("--deploy-config", str(path))]
    worker = ["--devices", devices] if devices else []
    worker += ["--cores-per-device", str(cores_per_device)] if cores_per_device else []
    wanted = [stage.strip() for stage in stages.split(",") if stage.strip()]
    session = UpSession(show_logs=logs, init_timeout_s=init_timeout, drain_timeout_s=drain_timeout)
    raise typer.Exit(session.run(LocalMesh(head, worker, stages=wanted, on_line=session.on_line), ready_file))

"""`stagemesh up`: a whole mesh on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.addresses import DEFAULT_HEAD
from stagemesh.cli.files import ModelFolder, PipelineFiles, PipelineSources, PolicyName
from stagemesh.cli.layering import (
    DefaultSampling,
    DeployConfig,
    EngineArg,
    Platform,
    StageInitTimeout,
    StageOverrides,
)
from stagemesh.cli.security import with_security
from stagemesh.cli.telemetry import LogJson, LogLevel, OtlpEndpoint, log_arguments, trace_arguments

if TYPE_CHECKING:
    from stagemesh.config import Pipeline


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(up)


@with_security(serves=True)
def up(
    pipelines: PipelineFiles = None,
    model: ModelFolder = None,
    stages: Annotated[
        str,
        typer.Option(metavar="LIST", help="Run only these stages here, by id or name: 0,2. Other nodes take the rest."),
    ] = "",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the head listens; port 0 picks one.")
    ] = DEFAULT_HEAD,
    stage_overrides: StageOverrides = "",
    deploy_config: DeployConfig = None,
    engine_arg: EngineArg = None,
    platform: Platform = "",
    policy: PolicyName = "",
    stage_init_timeout: StageInitTimeout = None,
    default_sampling_params: DefaultSampling = "",
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
    logs: Annotated[
        bool, typer.Option("--logs", help="Show the log lines of all processes.", rich_help_panel="Logs and traces")
    ] = False,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
    otlp_endpoint: OtlpEndpoint = "",
    ready_file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Written with HOST:PORT once everything is ready.")
    ] = None,
) -> None:
    """Start a head and a node on this machine, wait until every stage is ready, and serve until Ctrl-C.

      [bold]stagemesh up[/] examples/shapes/pipeline.yaml

      [bold]stagemesh up[/] --model /models/my-llm

    Run some stages here and wait for other machines to take the rest:

      [bold]stagemesh up[/] pipeline.yaml --stages 0 --listen 10.0.0.1:8470 --insecure

    Ctrl-C lets running requests finish; a second Ctrl-C stops at once. --log-json shows the logs too, as they are.
    """
    from stagemesh.cli.running import UpSession
    from stagemesh.launch.local import LocalMesh

    wanted = [stage.strip() for stage in stages.split(",") if stage.strip()]
    sources = PipelineSources(
        files=pipelines or (),
        model=model,
        stage_overrides=stage_overrides,
        deploy_config=deploy_config or (),
        engine_arg=engine_arg or (),
        platform=platform,
        policy=policy,
        stage_init_timeout=stage_init_timeout,
        default_sampling_params=default_sampling_params,
    )
    reserved = _reservations(sources.load(), wanted)
    head = [*sources.arguments(), "--listen", listen, "--drain-timeout", f"{drain_timeout:g}", *reserved]
    telemetry = [*log_arguments(log_level, log_json), *trace_arguments(otlp_endpoint)]
    head += telemetry
    worker = [*telemetry, *(["--devices", devices] if devices else [])]
    worker += ["--cores-per-device", str(cores_per_device)] if cores_per_device else []
    session = UpSession(
        show_logs=logs, logs_are_json=log_json, init_timeout_s=init_timeout, drain_timeout_s=drain_timeout
    )
    raise typer.Exit(session.run(LocalMesh(head, worker, stages=wanted, on_line=session.on_line), ready_file))


def _reservations(pipelines: list[Pipeline], wanted: list[str]) -> list[str]:
    """Slots that this node will fill are not for others, also before it has joined."""
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    for word in wanted:
        if not any(word in (stage.name, str(stage.stage_id)) for stage in stages):
            choices = ", ".join(f"{stage.stage_id} ({stage.name})" for stage in stages)
            raise typer.BadParameter(f"no stage {word!r}; there are {choices}", param_hint="--stages")
    mine = [stage for stage in stages if stage.name in wanted or str(stage.stage_id) in wanted]
    counts = {stage.name: stage.runtime.num_replicas for stage in mine}
    return [word for name, count in counts.items() for word in ("--reserve", f"{name}={count}")]

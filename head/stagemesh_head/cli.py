"""The `head` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
from stagemesh.cli.telemetry import LogJson, LogLevel, OtlpEndpoint, ask_for_traces, start_logging


def register(app: typer.Typer) -> None:
    """Add the command to the `stagemesh` app."""
    app.command("head")(head)
    app.command("gateway")(gateway)


@with_security(serves=True)
def head(
    pipelines: PipelineFiles = None,
    model: ModelFolder = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where clients, operators and nodes find it; port 0 picks one.",
            rich_help_panel="Addresses",
        ),
    ] = DEFAULT_HEAD,
    registry_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Another address for nodes; else the same.", rich_help_panel="Addresses"
        ),
    ] = None,
    gateways: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            metavar="N",
            rich_help_panel="Addresses",
            help="Gateway processes to run beside it, one a core. Several want --policy power-of-two: docs/routing.md.",
        ),
    ] = 0,
    gateway_listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where clients find those.", rich_help_panel="Addresses"),
    ] = "127.0.0.1:8480",
    metrics_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve Prometheus metrics at /metrics here; those of --gateways on the ports after it.",
            rich_help_panel="Addresses",
        ),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Written with HOST:PORT once the head serves.", rich_help_panel="Addresses"),
    ] = None,
    stage_overrides: StageOverrides = "",
    deploy_config: DeployConfig = None,
    engine_arg: EngineArg = None,
    platform: Platform = "",
    policy: PolicyName = "",
    stage_init_timeout: StageInitTimeout = None,
    default_sampling_params: DefaultSampling = "",
    reserve: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE=N",
            help="Keep N slots of a stage for the node that is started beside this head.",
            rich_help_panel="Configuration",
        ),
    ] = None,
    call_method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Control method that operators may run on replicas whose engine knows it, beyond the usual ones and "
            "those of a stage's control_methods; may be given often.",
            rich_help_panel="Configuration",
        ),
    ] = None,
    heartbeat_interval: Annotated[
        float, typer.Option(metavar="SECONDS", help="Between a node's heartbeats.", rich_help_panel="Times")
    ] = 1.0,
    heartbeat_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="A node that is silent for that long is gone.", rich_help_panel="Times"),
    ] = 10.0,
    link_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="A replica that the head cannot reach for that long, though its node is well, is placed anew; by "
            "default three heartbeat timeouts.",
            rich_help_panel="Times",
        ),
    ] = None,
    drain_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Time that running requests have at the end.", rich_help_panel="Times"),
    ] = 30.0,
    max_attempts: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Attempts of a task whose replica is lost, in all; 1 switches recovery off.",
            rich_help_panel="Times",
        ),
    ] = 3,
    recovery_timeout: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Time from a request's first loss in which its tasks may have another attempt.",
            rich_help_panel="Times",
        ),
    ] = 60.0,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
    otlp_endpoint: OtlpEndpoint = "",
) -> None:
    """Serve pipelines: coordinate the nodes, and answer clients.

      [bold]stagemesh head[/] pipeline.yaml

      [bold]stagemesh head[/] a.yaml b.yaml --listen 10.0.0.1:8470 --tls-cert head.pem --tls-key head.key

    Nodes join with `stagemesh worker --head HOST:PORT`, before or after it starts.
    SIGTERM or Ctrl-C lets running requests finish; a second one stops at once.
    """
    from stagemesh_head.app import HeadSettings, run, serve
    from stagemesh_head.orchestration.recovery import RecoveryLimits
    from stagemesh_head.registry.settings import RegistrySettings

    start_logging("head", log_level, log_json)
    ask_for_traces(otlp_endpoint)
    loaded = PipelineSources(
        files=pipelines or (),
        model=model,
        stage_overrides=stage_overrides,
        deploy_config=deploy_config or (),
        engine_arg=engine_arg or (),
        platform=platform,
        policy=policy,
        stage_init_timeout=stage_init_timeout,
        default_sampling_params=default_sampling_params,
    ).load()
    try:
        settings = HeadSettings(
            listen=listen,
            registry_listen=registry_listen,
            gateways=gateways,
            gateway_listen=gateway_listen,
            metrics_listen=metrics_listen,
            ready_file=ready_file,
            drain_timeout_s=drain_timeout,
            call_methods=tuple(call_method or ()),
            registry=RegistrySettings(
                heartbeat_interval_s=heartbeat_interval,
                lease_s=heartbeat_timeout,
                link_timeout_s=link_timeout,
                reserved=_reserved(reserve or [], loaded),
            ),
            recovery=RecoveryLimits(max_attempts=max_attempts, max_total_s=recovery_timeout),
        )
        run(serve(loaded, settings))
    except ValueError as error:
        raise _told(error) from error
    except OSError as error:
        if error.filename is not None:
            raise
        raise typer.BadParameter(str(error)) from error


@with_security(serves=True)
def gateway(
    head: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The head to follow, where its nodes join.")
    ] = DEFAULT_HEAD,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients find it; port 0 picks one.")
    ] = "127.0.0.1:8480",
    processes: Annotated[
        int,
        typer.Option(min=1, max=64, metavar="N", help="Processes that share the port, one a core: docs/routing.md."),
    ] = 1,
    ready_file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Written with HOST:PORT once it serves.")
    ] = None,
    metrics_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve Prometheus metrics at /metrics here; those of further --processes on the ports after it.",
        ),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time that running requests have at the end.")
    ] = 30.0,
    shares_port: Annotated[bool, typer.Option("--shares-port", hidden=True)] = False,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
    otlp_endpoint: OtlpEndpoint = "",
) -> None:
    """Serve clients beside a head: scale out over cores and machines, and go on while the head is restarted.

      [bold]stagemesh gateway[/] --head 10.0.0.1:8470 --listen 10.0.0.1:8480 --processes 4

    It follows the head's registry and keeps its last view while the head is away.
    """
    from stagemesh_head.app import GatewaySettings, run, serve_gateway
    from stagemesh_head.processes import run_sharing_a_port

    start_logging("gateway", log_level, log_json)
    ask_for_traces(otlp_endpoint)
    settings = GatewaySettings(
        head=head,
        listen=listen,
        ready_file=ready_file,
        metrics_listen=metrics_listen,
        drain_timeout_s=drain_timeout,
        shares_port=shares_port,
    )
    try:
        if processes > 1:
            raise typer.Exit(run_sharing_a_port(head, listen, processes, drain_timeout, ready_file, metrics_listen))
        run(serve_gateway(settings))
    except ValueError as error:
        raise _told(error) from error
    except OSError as error:
        raise typer.BadParameter(str(error)) from error


def _reserved(reserve: list[str], loaded: list[Any]) -> dict[tuple[str, str], int]:
    """--reserve STAGE=N by (pipeline, stage)."""
    result: dict[tuple[str, str], int] = {}
    for text in reserve:
        stage, separator, number = text.partition("=")
        if not separator or not number.isdecimal():
            raise typer.BadParameter(f"{text!r}: want STAGE=N, such as painter=1", param_hint="--reserve")
        homes = [one.name for one in loaded if any(known.name == stage for known in one.stages)]
        if not homes:
            raise typer.BadParameter(f"{text!r}: no pipeline has a stage {stage!r}", param_hint="--reserve")
        result.update({(name, stage): int(number) for name in homes})
    return result


def _told(error: ValueError) -> Exception:
    """Errors that say themselves what is wrong pass as they are."""
    from stagemesh.config import ConfigError
    from stagemesh.rpc.security import SecurityError

    if isinstance(error, ConfigError | SecurityError):
        return error
    return typer.BadParameter(str(error))

"""The `stagemesh worker` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagemesh.addresses import default_head
from stagemesh.cli.security import with_security
from stagemesh.cli.telemetry import LogJson, LogLevel, OtlpEndpoint, ask_for_traces, start_logging

ANY_STAGE = "any"


def register(app: typer.Typer) -> None:
    """Add the command to the one app."""
    app.command("worker")(worker)


@with_security(serves=True)
def worker(
    head: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the head.", default_factory=default_head)],
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Stage to run; repeat for several. `any` takes what is needed most."),
    ] = None,
    replicas: Annotated[int, typer.Option(min=0, help="Most replicas here; 0: as many as the devices hold.")] = 0,
    pipeline: Annotated[str, typer.Option(metavar="NAME", help="Pipeline, where the head serves several.")] = "",
    node_id: Annotated[
        str, typer.Option(metavar="ID", help="Stable id of this node; by default the host's name.")
    ] = "",
    devices: Annotated[
        str, typer.Option(metavar="ID,...", help="Devices to offer, such as cuda:0,cuda:1 or cpu:0; all by default.")
    ] = "",
    cores_per_device: Annotated[
        int, typer.Option(min=0, metavar="N", help="Cores in each CPU core set; 0: one each, in 8 sets at most.")
    ] = 0,
    listen_host: Annotated[str, typer.Option(metavar="HOST", help="Where replicas listen.")] = "127.0.0.1",
    advertise_host: Annotated[
        str,
        typer.Option(metavar="HOST", help="Where others reach them; by default the source of the route to the head."),
    ] = "",
    health_listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Serve grpc.health.v1 for probes here.")] = "",
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label of this node; repeatable.")
    ] = None,
    drain_timeout: Annotated[float, typer.Option(min=0, metavar="S", help="Longest drain after SIGTERM.")] = 30.0,
    give_up_after: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="Exit after so long without a head; never by default.")
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the node id here once the head has accepted it.")
    ] = None,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
    otlp_endpoint: OtlpEndpoint = "",
) -> None:
    """Offer this machine's devices to a head and run the replicas it assigns.

    Start it before or after the head, in any order, on as many machines as you like:

      [bold]stagemesh worker[/] --head 10.0.0.1:8470 --stage painter

    SIGTERM (or Ctrl-C) drains: running requests finish first. A second one stops at once.
    """
    from stagemesh.rpc.security import SecurityError
    from stagemesh_worker.app import run_worker
    from stagemesh_worker.node.identity import parse_labels, url_host
    from stagemesh_worker.node.settings import AgentSettings

    output = start_logging("node", log_level, log_json)
    ask_for_traces(otlp_endpoint)
    try:
        settings = AgentSettings(
            head=head,
            stages=() if ANY_STAGE in (stage or ()) else tuple(stage or ()),
            pipeline=pipeline,
            max_replicas=replicas,
            node_id=node_id,
            devices=tuple(part.strip() for part in devices.split(",") if part.strip()),
            cores_per_device=cores_per_device or None,
            listen_host=url_host(listen_host),
            advertise_host=url_host(advertise_host),
            health_listen=health_listen,
            drain_timeout_s=drain_timeout,
            give_up_after_s=give_up_after,
            ready_file=ready_file,
            labels=parse_labels(label or ()),
        )
        run_worker(settings, output)
    except SecurityError:
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

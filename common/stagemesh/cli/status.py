"""`stagemesh status`: stages, replicas, nodes, devices, load, and what is missing."""

from __future__ import annotations

from typing import Annotated

import typer

from stagemesh.addresses import DEFAULT_HEAD
from stagemesh.cli.exits import UNAVAILABLE
from stagemesh.cli.options import HeadOption, JsonOption
from stagemesh.cli.security import with_security


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(status)


@with_security()
def status(
    head: HeadOption = DEFAULT_HEAD,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on showing it, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How often with --watch.")] = 1.0,
    requests: Annotated[bool, typer.Option("--requests", "-r", help="Also the requests in flight.")] = False,
    gone: Annotated[
        bool, typer.Option("--gone", help="Also replicas that are gone, kept a while for inspection.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help=f"End with status {UNAVAILABLE} unless all is ready.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what the mesh serves, where, and what is missing.

      [bold]stagemesh status[/] --watch

      [bold]stagemesh status[/] --check && echo "serves"

    TASKS is what runs + what waits inside a replica; SEEN is the age of its node's last heartbeat.
    """
    from stagemesh.cli.live import watch as watch_mesh
    from stagemesh.cli.tables import status_view, take_snapshot
    from stagemesh.cli.terminal import out
    from stagemesh.client.admin import AdminClient
    from stagemesh.client.sync import Client

    if watch:
        watch_mesh(head, interval, lambda seen: status_view(seen, show_requests=requests), include_gone=gone)
    with Client(head, max_retries=0) as client, AdminClient(head) as admin:
        snapshot = take_snapshot(client, admin, include_gone=gone)
    if as_json:
        _print_json(snapshot)
    else:
        out().print(status_view(snapshot, show_requests=requests))
    stages = [stage for pipeline in snapshot.pipelines for stage in pipeline.stages]
    if check and any(stage.ready_replicas < stage.target_replicas for stage in stages):
        raise typer.Exit(UNAVAILABLE)


def _print_json(snapshot: object) -> None:
    import dataclasses
    import json
    from collections.abc import Mapping

    from google.protobuf import json_format
    from google.protobuf.message import Message

    def plain(value: object) -> object:
        if isinstance(value, Message):
            return json_format.MessageToDict(value, preserving_proto_field_name=True)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return dict(value) if isinstance(value, Mapping) else value

    print(json.dumps(plain(snapshot), indent=2))

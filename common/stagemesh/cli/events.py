"""`stagemesh events`: what happens to nodes and replicas, as it happens."""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.addresses import DEFAULT_HEAD
from stagemesh.cli.options import HeadOption, JsonOption
from stagemesh.cli.security import with_security

if TYPE_CHECKING:
    from stagemesh.v1 import admin_pb2 as admin_pb


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(events)


@with_security()
def events(
    past: Annotated[bool, typer.Option("--past", help="First those that the head still keeps, up to 1,000.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="End after so many; 0: at Ctrl-C.")] = 0,
    head: HeadOption = DEFAULT_HEAD,
    as_json: JsonOption = False,
) -> None:
    """Print events until Ctrl-C: nodes that join and leave, replicas that start, fail and drain, each with the reason.

    [bold]stagemesh events[/] --past
    """
    from google.protobuf import json_format

    from stagemesh.client.admin import AdminClient

    with AdminClient(head) as admin:
        for number, event in enumerate(admin.watch_events(include_past=past), 1):
            if as_json:
                line = json_format.MessageToJson(event, indent=None, preserving_proto_field_name=True)
            else:
                line = _line(event)
            print(line, flush=True)
            if number == count:
                return


def _line(event: admin_pb.MeshEvent) -> str:
    from stagemesh.cli.tables import replica_name

    time = event.time.ToDatetime(tzinfo=UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
    who = replica_name(event.replica) if event.HasField("replica") else ""
    where = f"on {event.node_id}" if event.node_id and who else event.node_id
    change = " → ".join(state for state in (event.from_state, event.to_state) if state)
    parts = [time, f"{event.type:<20}", who, where, change]
    return "  ".join(part for part in parts if part) + (f": {event.reason}" if event.reason else "")

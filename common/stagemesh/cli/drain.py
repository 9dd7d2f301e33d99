"""`stagemesh drain`: take a replica or a node out of service without a failed request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.addresses import DEFAULT_HEAD
from stagemesh.cli.options import HeadOption, PipelineOption
from stagemesh.cli.security import with_security

if TYPE_CHECKING:
    from stagemesh.client.admin import AdminClient

POLL_S = 0.25
MARGIN_S = 15.0
"""After the grace, for engines to end and the word to come."""

Grace = Annotated[float, typer.Option("--grace", min=0.0, metavar="SECONDS", help="Time for running requests.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is gone.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the event log.")]

drain = typer.Typer(no_args_is_help=True, help="Take a replica or a node out of service; running requests finish.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(drain, name="drain")


@drain.command()
@with_security()
def replica(
    name: Annotated[str, typer.Argument(metavar="STAGE/ID", help="Which one, as `stagemesh status` shows it.")],
    pipeline: PipelineOption = "",
    grace: Grace = 60.0,
    wait: Wait = True,
    reason: Reason = "",
    head: HeadOption = DEFAULT_HEAD,
) -> None:
    """Give a replica nothing new, let it finish, and remove it. It is replaced where a node has room.

    [bold]stagemesh drain replica[/] painter/0
    """
    from stagemesh.client.admin import AdminClient
    from stagemesh.v1 import replica_pb2 as replica_pb

    stage, slash, number = name.rpartition("/")
    if not slash or not number.isdecimal():
        raise typer.BadParameter(f"{name!r}: want STAGE/ID, such as painter/0", param_hint="STAGE/ID")
    with AdminClient(head) as admin:
        drained = admin.drain_replica(pipeline, stage, int(number), grace_s=grace, reason=reason).report.replica

        def is_gone() -> bool:
            rows, _ = admin.list_replicas(pipeline=drained.pipeline, stage=stage)
            return not any(
                row.report.replica.replica_id == drained.replica_id
                and row.report.replica.incarnation == drained.incarnation
                and row.state != replica_pb.REPLICA_STATE_GONE
                for row in rows
            )

        _finish(f"replica {name}", is_gone, grace, wait)


@drain.command()
@with_security()
def node(
    name: Annotated[str, typer.Argument(metavar="NODE", help="Its id, as `stagemesh status` shows it.")],
    grace: Grace = 60.0,
    wait: Wait = True,
    reason: Reason = "",
    head: HeadOption = DEFAULT_HEAD,
) -> None:
    """Let all replicas of a node finish, and let it leave.

    [bold]stagemesh drain node[/] gpu-3 --grace 120 --reason "new driver"
    """
    from stagemesh.client.admin import AdminClient

    with AdminClient(head) as admin:
        drained = admin.drain_node(name, grace_s=grace, reason=reason)
        _finish(f"node {name}", lambda: _has_left(admin, name, drained.incarnation), grace, wait)


def _has_left(admin: AdminClient, node_id: str, incarnation: str) -> bool:
    """The node is gone, or a new start of it has taken its place, or it has no replica left."""
    from stagemesh.v1 import admin_pb2 as admin_pb

    rows = [row for row in admin.list_nodes() if row.node_id == node_id and row.incarnation == incarnation]
    return all(row.state == admin_pb.NODE_STATE_GONE or not row.replicas for row in rows)


def _finish(what: str, is_done: Callable[[], bool], grace: float, wait: bool) -> None:
    from stagemesh.cli.terminal import err, seconds
    from stagemesh.client.errors import RequestTimeout
    from stagemesh.rpc.errors import Reason as ErrorReason

    if not wait:
        print(f"{what} drains")
        return
    begin = time.monotonic()
    with err().status(f"{what} drains, up to {seconds(grace)}"):
        while not is_done():
            if time.monotonic() - begin > grace + MARGIN_S:
                raise RequestTimeout(ErrorReason.REQUEST_TIMEOUT, f"{what} is still there after {seconds(grace)}")
            time.sleep(POLL_S)
    print(f"{what} is drained, after {seconds(time.monotonic() - begin)}")

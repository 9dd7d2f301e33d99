"""`stagemesh health`: the check that container probes run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from stagemesh.addresses import DEFAULT_HEAD
from stagemesh.cli.exits import UNAVAILABLE
from stagemesh.cli.options import HeadOption
from stagemesh.cli.security import with_security


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(health)


@with_security()
def health(
    head: HeadOption = DEFAULT_HEAD,
    service: Annotated[
        str,
        typer.Option(metavar="NAME", help="Full name of a service: is it ready? Without one: is the process alive?"),
    ] = "",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest wait for the answer.")] = 2.0,
) -> None:
    """Ask a process whether it is alive, or one of its services whether it is ready.

    Any process of the mesh answers: a head, a node agent's health port, a replica's endpoint.

      [bold]stagemesh health[/]

      [bold]stagemesh health[/] --head 127.0.0.1:8471 --service stagemesh.v1.StageService
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from stagemesh.client.errors import from_call
    from stagemesh.client.sync import open_sync_channel
    from stagemesh.rpc.security import Security

    request = health_pb2.HealthCheckRequest(service=service)
    with open_sync_channel(head, Security.from_environment()) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(request, timeout=timeout)
        except grpc.RpcError as error:
            raise from_call(error, head) from None
    word = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    print(word)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise typer.Exit(UNAVAILABLE)

"""`stagemesh scale`: how many replicas a stage should have."""

from __future__ import annotations

from typing import Annotated

import typer

from stagemesh.addresses import DEFAULT_HEAD
from stagemesh.cli.options import HeadOption, PipelineOption
from stagemesh.cli.security import with_security


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(scale)


@with_security()
def scale(
    stage: Annotated[str, typer.Argument(help="Name of the stage.")],
    replicas: Annotated[int, typer.Argument(min=0, help="How many it should have.")],
    pipeline: PipelineOption = "",
    head: HeadOption = DEFAULT_HEAD,
) -> None:
    """Set how many replicas a stage should have. Nodes with room start more; the highest ids drain first.

    [bold]stagemesh scale[/] painter 2
    """
    from stagemesh.cli.tables import replica_name
    from stagemesh.client.admin import AdminClient

    with AdminClient(head) as admin:
        answer = admin.scale_stage(stage, replicas, pipeline=pipeline)
    print(f"{stage}: {answer.previous_replicas} → {answer.replicas} replicas")
    for slot in answer.missing:
        print(f"  {replica_name(slot.replica)} has no place yet: {slot.reason}")

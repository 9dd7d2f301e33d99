"""A view of the mesh that is renewed until Ctrl-C, also over a head that restarts."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from stagemesh.cli.tables import Snapshot, take_snapshot
from stagemesh.cli.terminal import out
from stagemesh.client.admin import AdminClient
from stagemesh.client.errors import Unreachable
from stagemesh.client.sync import Client


def watch(head: str, interval_s: float, view: Callable[[Snapshot], RenderableType], *, include_gone: bool) -> None:
    """Show `view` of the mesh every `interval_s` seconds, until Ctrl-C."""
    with (
        Client(head, max_retries=0) as client,
        AdminClient(head) as admin,
        Live(console=out(), screen=out().is_terminal, auto_refresh=False) as live,
    ):
        while True:
            clock = Text(f"{head}  {time.strftime('%H:%M:%S')}  Ctrl-C ends", style="dim")
            try:
                shown: RenderableType = view(take_snapshot(client, admin, include_gone=include_gone))
            except Unreachable as error:
                shown = Text(f"{error}: waiting for it", style="bold red")
            live.update(Group(clock, Text(""), shown), refresh=True)
            time.sleep(interval_s)

"""`stagemesh top`: who works how much, now."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.addresses import DEFAULT_HEAD
from stagemesh.cli.options import HeadOption
from stagemesh.cli.security import with_security

if TYPE_CHECKING:
    from rich.console import Group

    from stagemesh.cli.tables import Snapshot


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(top)


@with_security()
def top(
    head: HeadOption = DEFAULT_HEAD,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How often.")] = 1.0,
) -> None:
    """Watch the load of every replica and the oldest requests, until Ctrl-C.

    BOUND is what this head has on a replica; RUN and WAIT are what the replica says; STEPS/S is the pace of its engine.
    """
    from stagemesh.cli.live import watch

    watch(head, interval, TopView().view, include_gone=False)


class TopView:
    """Rates need two looks: it keeps the last one."""

    def __init__(self) -> None:
        self._steps: dict[str, tuple[int, float]] = {}

    def view(self, snapshot: Snapshot) -> Group:
        """Load by replica, busiest first, and the oldest requests."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        from stagemesh.cli.tables import replica_name, requests_table
        from stagemesh.cli.terminal import mebibytes, seconds

        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for name in ("REPLICA", "NODE", "BOUND", "RUN", "WAIT", "STEPS/S", "KV CACHE", "MEMORY", "SINCE A STEP"):
            table.add_column(name, justify="left" if name in ("REPLICA", "NODE") else "right")
        now = time.monotonic()
        for row in sorted(snapshot.replicas, key=lambda row: -(row.inflight + row.report.load.running)):
            load, name = row.report.load, replica_name(row.report.replica)
            before, then = self._steps.get(row.report.replica.incarnation, (load.engine_steps, now))
            self._steps[row.report.replica.incarnation] = (load.engine_steps, now)
            rate = (load.engine_steps - before) / (now - then) if now > then else 0.0
            table.add_row(
                name,
                row.node_id,
                str(row.inflight),
                str(load.running),
                str(load.waiting),
                f"{rate:,.1f}",
                f"{load.kv_cache_usage:.0%}" if load.kv_cache_usage else "",
                mebibytes(load.memory_bytes),
                seconds(load.since_progress.ToNanoseconds() / 1e9) if load.running else "",
            )
        living = {row.report.replica.incarnation for row in snapshot.replicas}
        self._steps = {key: value for key, value in self._steps.items() if key in living}
        count = Text(f"{len(snapshot.requests)} requests in flight", style="bold")
        return Group(table, Text(""), count, requests_table(snapshot.requests, limit=15))

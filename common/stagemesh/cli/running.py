"""What `stagemesh up` does from start to end: show what it waits for, serve, stop in order."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from rich.live import Live
from rich.table import Table

from stagemesh.addresses import DEFAULT_HEAD, default_head
from stagemesh.cli.exits import INTERRUPTED
from stagemesh.cli.terminal import err, out, seconds
from stagemesh.client.admin import AdminClient
from stagemesh.client.errors import RequestTimeout, StageMeshError, Unreachable
from stagemesh.client.sync import Client
from stagemesh.launch.local import LocalMesh
from stagemesh.launch.readiness import Readiness, SlotProgress, look
from stagemesh.launch.ready_file import write_ready_file
from stagemesh.rpc.errors import Reason

START_POLL_S, SERVE_POLL_S = 0.2, 1.0
_STYLES = {"ready": "green", "failed": "bold red", "missing": "yellow"}


class UpSession:
    """One run of `stagemesh up`."""

    def __init__(self, *, show_logs: bool, logs_are_json: bool, init_timeout_s: float, drain_timeout_s: float) -> None:
        """Args: logs_are_json: lines are shown as the processes print them, also without `show_logs`."""
        self._show_logs = show_logs
        self._logs_are_json = logs_are_json
        self._init_timeout_s = init_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._stop = threading.Event()
        self._mesh: LocalMesh | None = None
        self._last: dict[tuple[str, str, int], SlotProgress] = {}
        self._since: dict[tuple[str, str, int], float] = {}

    def on_line(self, name: str, line: str) -> None:
        """A line that one of the processes printed."""
        if self._logs_are_json:
            # In one piece: each process's lines come from a thread of its own, and print() writes the end apart.
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        elif self._show_logs:
            err().print(f"[{name}] {line}", style="dim", markup=False, soft_wrap=True)

    def run(self, mesh: LocalMesh, ready_file: Path | None) -> int:
        """Serve until a signal; returns the exit status.

        Raises:
            StartFailed: with the failing stage's own last lines. Nothing is left running, however this ends.
        """
        self._mesh = mesh
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            begin = time.monotonic()
            mesh.start()
            with Client(mesh.address, max_retries=0) as client, AdminClient(mesh.address) as admin:
                readiness = self._await_ready(mesh, client, admin)
                if readiness is None:
                    err().print("interrupted while starting: stopping", style="bold")
                    self._stop_mesh(mesh, now=True)
                    return INTERRUPTED
                self._announce(mesh.address, readiness, time.monotonic() - begin)
                if ready_file is not None:
                    write_ready_file(ready_file, mesh.address)
                self._serve(mesh, client, admin)
                self._say_goodbye(admin)
                self._stop_mesh(mesh, now=False)
            return 0
        finally:
            self._stop_mesh(mesh, now=True)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop.is_set() and self._mesh is not None:
            self._mesh.hurry()
        self._stop.set()

    def _stop_mesh(self, mesh: LocalMesh, *, now: bool) -> None:
        mesh.stop(drain_s=self._drain_timeout_s, now=now)

    # ---------------------------------------------------------------- starting

    def _await_ready(self, mesh: LocalMesh, client: Client, admin: AdminClient) -> Readiness | None:
        """Wait until all is ready; None when a signal came first."""
        err().print(f"the head serves at {mesh.address}; waiting for its stages", markup=False)
        deadline = time.monotonic() + self._init_timeout_s
        with Live(console=err(), auto_refresh=False, transient=True) as live:
            while not self._stop.wait(START_POLL_S):
                mesh.check()
                try:
                    readiness = look(client, admin)
                except Unreachable:
                    continue  # check() says more, if it is gone
                if readiness.failures:
                    raise readiness.failures[0]
                if readiness.is_ready:
                    return readiness
                changed = self._note(readiness)
                if err().is_terminal:
                    live.update(self._table(readiness), refresh=True)
                else:
                    for slot in changed:
                        err().print(_line(slot), markup=False, soft_wrap=True)
                if time.monotonic() > deadline:
                    raise _not_ready(readiness, self._init_timeout_s)
        return None

    def _note(self, readiness: Readiness) -> list[SlotProgress]:
        """Slots that changed since the last look."""
        slots = {(slot.pipeline, slot.stage, slot.replica_id): slot for slot in readiness.slots}
        changed = [slot for key, slot in slots.items() if self._last.get(key) != slot]
        now = time.monotonic()
        self._since = {
            key: self._since[key] if key in self._since and self._last.get(key) == slot else now
            for key, slot in slots.items()
        }
        self._last = slots
        return changed

    def _table(self, readiness: Readiness) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        now = time.monotonic()
        for slot in readiness.slots:
            since = self._since[slot.pipeline, slot.stage, slot.replica_id]
            style = _STYLES.get(slot.state, "cyan")
            waited = "" if slot.state == "ready" else f"{now - since:.0f} s"
            table.add_row(f"{slot.stage}/{slot.replica_id}", f"[{style}]{slot.state}[/]", waited, slot.detail)
        return table

    def _announce(self, address: str, readiness: Readiness, took_s: float) -> None:
        pipelines = list(dict.fromkeys(slot.pipeline for slot in readiness.slots))
        count = sum(slot.state == "ready" for slot in readiness.slots)
        replicas = "1 replica" if count == 1 else f"{count} replicas"
        out().print(f"[bold green]ready[/] after {seconds(took_s)} at [bold]{address}[/], with {replicas}")
        where = "" if address == default_head() == DEFAULT_HEAD else f" --head {address}"
        which = f" --pipeline {pipelines[0]}" if len(pipelines) > 1 else ""
        out().print(f'  stagemesh generate "a red circle at night" --out out{where}{which}', markup=False)
        out().print("Ctrl-C stops it", style="dim")

    # ---------------------------------------------------------------- serving and stopping

    def _serve(self, mesh: LocalMesh, client: Client, admin: AdminClient) -> None:
        """Until a signal; says what changes among the replicas."""
        self._note(look(client, admin))
        while not self._stop.wait(SERVE_POLL_S):
            mesh.check()
            try:
                changed = self._note(look(client, admin))
            except StageMeshError as error:
                err().print(f"the head does not answer: {error}", style="yellow", markup=False)
                continue
            for slot in changed:
                err().print(_line(slot), markup=False, soft_wrap=True)

    def _say_goodbye(self, admin: AdminClient) -> None:
        try:
            running = len(admin.list_requests())
        except StageMeshError:
            running = 0
        if running:
            requests = "1 request runs" if running == 1 else f"{running} requests run"
            limit = seconds(self._drain_timeout_s)
            err().print(f"{requests}: draining, up to {limit}; Ctrl-C again stops at once", style="bold")
        else:
            err().print("stopping", style="bold")


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _line(slot: SlotProgress) -> str:
    where = f" on {slot.node_id}" if slot.node_id else ""
    return f"{slot.stage}/{slot.replica_id}: {slot.state}{where}" + (f": {slot.detail}" if slot.detail else "")


def _not_ready(readiness: Readiness, timeout_s: float) -> RequestTimeout:
    waiting: Any = [_line(slot) for slot in readiness.slots if slot.state != "ready"]
    return RequestTimeout(
        Reason.REQUEST_TIMEOUT, f"not ready after {seconds(timeout_s)}: {'; '.join(waiting) or 'no replica is known'}"
    )

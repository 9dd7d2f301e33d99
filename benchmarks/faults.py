"""Every fault on a mesh of real processes: what is noticed, after how long, and what clients saw, as a table.

    python benchmarks/faults.py                      # all faults, idle and under load: about six minutes
    python benchmarks/faults.py --only "kill -9"     # those whose name has these words

One head, two nodes with a replica each, the synthetic engine; every fault hits the first node, replica 0 or the head.
Times are from the blow to the head's event (or, where the head itself is hit, to the node's log line), and from the
repair until both nodes are live and both replicas ready; where nobody repairs anything, from the blow. Repairs follow
what is noticed at once, or come after two seconds where nothing is.
Idle rows ask three times after the event; the others have three clients that ask all along.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the helpers of the fault tests

import faults_catalogue as catalogue
from faults_catalogue import Fault, Scene

from stagemesh.client.admin import AdminClient
from stagemesh.client.errors import StageMeshError
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from tests.mesh.faults.load import Load
from tests.mesh.faults.processes import eventually, processes
from tests.mesh.faults.proxy import Proxy

PIPELINE = """
name: sketch
stages:
- {name: writer, engine: synthetic, engine_args: {tokens: 20, tokens_per_second: 40}, runtime: {num_replicas: 2}}
"""
HEADER = "| fault | clients | noticed as | after | healed after | requests | failed | slowest |"
NOTICE_S = 20.0
UNNOTICED_S = 2.0
REQUESTS = 3


class Events:
    """The head's events with the time at which they arrived; watched anew whenever the head was away."""

    def __init__(self, address: str) -> None:
        self.seen: list[tuple[float, str, str]] = []
        self._address = address
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._over.is_set():
            with AdminClient(self._address) as admin, contextlib.suppress(StageMeshError):
                for event in admin.watch_events(include_past=True):
                    about = event.type + (f" {event.replica.replica_id}" if event.HasField("replica") else "")
                    self.seen.append((time.monotonic(), about, event.reason))
            self._over.wait(0.05)

    def close(self) -> None:
        """No new watch; the running one ends with the head."""
        self._over.set()

    def first(self, words: str, since: float) -> tuple[float, str] | None:
        """When the first event with `words` in it came, and its text."""
        for at, about, reason in list(self.seen):
            if at >= since and words in about:
                return at, f"{about}: {reason}" if reason else about
        return None


@dataclass(frozen=True, slots=True)
class Row:
    """One measured line."""

    fault: str
    clients: str
    noticed: str
    after_s: float | None
    healed_s: float | None
    requests: int
    failed: int
    slowest_s: float
    errors: tuple[str, ...]

    def __str__(self) -> str:
        after, healed = ("-" if took is None else f"{took:.2f} s" for took in (self.after_s, self.healed_s))
        return (
            f"| {self.fault} | {self.clients} | {self.noticed} | {after} | {healed} "
            f"| {self.requests} | {self.failed} | {self.slowest_s:.1f} s |"
        )


def measure(fault: Fault, scene: Scene, events: Events, loaded: bool) -> Row:
    """Strike, wait for what should be noticed, repair, wait until all is well."""
    load = Load(scene.mesh, threads=3 if loaded else 1)
    if loaded:
        load.start()
        eventually("load runs", lambda: load.done > 3)
    struck = time.monotonic()
    fault.strike(scene)
    found = _noticed(fault, scene, events, struck)
    if not loaded:
        for _ in range(REQUESTS):
            load.ask(0)
    repaired = struck
    if fault.repair is not None:
        repaired = time.monotonic()
        fault.repair(scene)
    eventually("both nodes and replicas are well", lambda: _is_well(scene))
    breaks_nothing = fault.repair is None and found is None
    healed = None if breaks_nothing else time.monotonic() - repaired
    if loaded:
        seen = load.done
        eventually("load goes on", lambda: load.done > seen + 3)
        load.stop()
    outcomes = [o for o in (*load.answered, *load.failed) if o.ended > struck]
    errors = tuple(sorted({o.error for o in load.failed}))
    return Row(
        fault.name, "load" if loaded else "idle",
        found[1] if found else "nothing", found[0] - struck if found else None, healed,
        len(outcomes), len(load.failed), max(o.seconds for o in outcomes), errors,
    )  # fmt: skip


def _is_well(scene: Scene) -> bool:
    states = [node.state for node in scene.mesh.nodes().values() if node.state != admin_pb.NODE_STATE_GONE]
    replicas = [row.state for row in scene.mesh.replicas()]
    return states == [admin_pb.NODE_STATE_LIVE] * 2 and replicas.count(replica_pb.REPLICA_STATE_READY) == 2


def _noticed(fault: Fault, scene: Scene, events: Events, since: float) -> tuple[float, str] | None:
    def probe() -> tuple[float, str] | None:
        if fault.log_line:
            found = any(fault.log_line in line for line in scene.log_since(since))
            return (time.monotonic(), f"node log: {fault.log_line}") if found else None
        return events.first(fault.event, since)

    if not fault.log_line and not fault.event:
        time.sleep(UNNOTICED_S)  # nothing is expected: what counts is what clients see meanwhile
        return events.first("", since)
    deadline = time.monotonic() + NOTICE_S
    while time.monotonic() < deadline:
        if found := probe():
            return found
        time.sleep(0.01)
    return None


@contextlib.contextmanager
def scene(folder: Path) -> Iterator[Scene]:
    """A mesh whose first node speaks to the head over a wire that can be cut."""
    locks = folder / "locks"
    os.environ["STAGEMESH_LOCK_DIR"] = str(locks)
    with processes(folder, PIPELINE) as mesh:
        head = mesh.start_head()
        with Proxy(mesh.address) as proxy:
            made = Scene(mesh, proxy, locks, head)
            made.start_first_node()
            mesh.start_worker("b", "--devices", "cpu:1")
            mesh.ready(2)
            yield made


def measure_anew(fault: Fault, loaded: bool) -> Row:
    """Measure on a mesh of its own, so that no fault inherits the damage of another."""
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        scene(Path(folder)) as made,
        contextlib.closing(Events(made.mesh.address)) as events,
        made.held,
    ):
        eventually("events come", lambda: events.seen)
        return measure(fault, made, events, loaded)


def run(faults: list[Fault], say: Callable[[str], None]) -> list[Row]:
    """Measure all, idle and under load."""
    say(HEADER)
    say("|---|---|---|---|---|---|---|---|")
    rows = []
    for fault in faults:
        for loaded in (False, True):
            clients = "load" if loaded else "idle"
            try:
                rows.append(measure_anew(fault, loaded))
            except (AssertionError, OSError) as error:
                say(f"| {fault.name} | {clients} | NOT MEASURED: {str(error).splitlines()[0]} |")
                continue
            say(str(rows[-1]))
            for text in rows[-1].errors:
                print(f"  {text}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="only faults whose name has these words; may be given often")
    arguments = parser.parse_args()
    wanted = arguments.only or [""]
    faults = [fault for fault in catalogue.FAULTS if any(words in fault.name for words in wanted)]
    if not faults:
        parser.error(f"--only {', '.join(wanted)}: want words of one of {', '.join(f.name for f in catalogue.FAULTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the mesh of the moment is taken down
    run(faults, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()

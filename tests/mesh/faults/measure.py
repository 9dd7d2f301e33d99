"""One fault on one mesh: strike, see what is noticed and when, repair, see when all is well and what clients saw."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace

from stagemesh.client.admin import AdminClient
from stagemesh.client.errors import StageMeshError
from tests.mesh.faults.catalogue import Fault
from tests.mesh.faults.load import Load
from tests.mesh.faults.processes import eventually
from tests.mesh.faults.scene import Scene

NOTICE_S = 20.0
UNNOTICED_S = 2.0
REQUESTS = 3
CLIENTS = 3


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
    """One measured line. Seconds; None where there was nothing to measure."""

    fault: str
    clients: str
    noticed: str
    after_s: float | None
    healed_s: float | None
    requests: int
    failed: int
    slowest_s: float
    errors: tuple[str, ...]

    def with_short_paths(self, folder: str) -> Row:
        """The same, with the name of a passing folder left out."""
        return replace(self, noticed=self.noticed.replace(f"{folder}/", ""))


def measure(fault: Fault, scene: Scene, events: Events, *, loaded: bool, lease_s: float) -> Row:
    """Strike, wait for what should be noticed, repair, wait until all is well.

    Raises:
        AssertionError: it does not get well, or the load does not go on.
    """
    load = Load(scene.mesh, threads=CLIENTS if loaded else 1)
    with scene.blow, load if loaded else contextlib.nullcontext():
        if loaded:
            eventually("load runs", lambda: load.done > CLIENTS)
        struck = time.monotonic()
        fault.strike(scene)
        unnoticed_s = lease_s + 1.0 if fault.is_watched_for_a_lease else UNNOTICED_S
        found = _noticed(fault, scene, events, struck, unnoticed_s)
        if not loaded:
            for _ in range(REQUESTS):
                load.ask(0)
        repaired = struck
        if fault.repair is not None:
            repaired = time.monotonic()
            fault.repair(scene)
        eventually("both nodes and replicas are well", scene.is_well)
        healed_s = None if fault.repair is None and found is None else time.monotonic() - repaired
        if loaded:
            seen = load.done
            eventually("load goes on", lambda: load.done > seen + CLIENTS)
    outcomes = [outcome for outcome in (*load.answered, *load.failed) if outcome.ended > struck]
    return Row(
        fault.name, "load" if loaded else "idle",
        found[1] if found else "nothing", found[0] - struck if found else None, healed_s,
        len(outcomes), len(load.failed), max(outcome.seconds for outcome in outcomes), tuple(sorted(load.failures)),
    )  # fmt: skip


def _noticed(fault: Fault, scene: Scene, events: Events, since: float, unnoticed_s: float) -> tuple[float, str] | None:
    """When it was noticed, and how; where nothing should be, whatever was within `unnoticed_s` seconds."""
    is_expected = bool(fault.log_line or fault.event)
    deadline = time.monotonic() + (NOTICE_S if is_expected else unnoticed_s)
    while time.monotonic() < deadline:
        if not fault.log_line:
            found = events.first(fault.event, since)
        elif any(fault.log_line in line for line in scene.a_log):
            found = time.monotonic(), f"node log: {fault.log_line}"
        else:
            found = None
        if found:
            return found
        time.sleep(0.01)
    return None

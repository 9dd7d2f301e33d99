"""Every fault of the catalogue on real processes, idle and under load: it is noticed as it should be, and heals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.mesh.faults.catalogue import FAULTS, Fault
from tests.mesh.faults.measure import Events, measure
from tests.mesh.faults.processes import eventually
from tests.mesh.faults.scene import Scene, scene

LEASE_S = 4.0
TIMES = ["--heartbeat-interval", "0.8", "--heartbeat-timeout", f"{LEASE_S:g}"]


class Stage:
    """Meshes for one test after the other: faults that need no special one share one, as long as it is well."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._scene: Scene | None = None
        self._events: Events | None = None
        self._kind: object = None
        self._open = ExitStack()

    def of(self, fault: Fault) -> tuple[Scene, Events]:
        """A mesh for a fault, and its events."""
        is_fit = self._kind is fault.prepare and not fault.happens_once
        if self._scene is None or self._events is None or not is_fit or not self._scene.is_well():
            self.close()
            folder: Path = self._factory.mktemp("faults")
            made = self._open.enter_context(scene(folder))
            made.head_arguments += TIMES
            if fault.prepare is not None:
                fault.prepare(made)
            made.start()
            events = self._open.enter_context(contextlib.closing(Events(made.mesh.address)))
            eventually("events come", lambda: events.seen)
            self._scene, self._events, self._kind = made, events, fault.prepare
        return self._scene, self._events

    def close(self) -> None:
        self._open.close()
        self._open = ExitStack()
        self._scene = self._events = None


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory)
    yield made
    made.close()


@pytest.mark.parametrize("loaded", [False, True], ids=["idle", "load"])
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_fault_is_noticed_and_heals_and_no_client_sees_it(stage: Stage, fault: Fault, loaded: bool) -> None:
    if reason := fault.why_not():
        pytest.skip(reason)
    made, events = stage.of(fault)
    before = made.replica_processes()
    row = measure(fault, made, events, loaded=loaded, lease_s=LEASE_S)
    if fault.event or fault.log_line:
        assert row.after_s is not None, "it was not noticed"
    else:
        assert row.noticed == "nothing"
    if fault.clients_may_see:
        assert all(fault.clients_may_see in error for error in row.errors), row.errors
    else:
        assert row.errors == ()
    assert row.requests >= 3
    assert (made.replica_processes() == before) is not fault.starts_a_replica

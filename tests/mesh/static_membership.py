"""A membership that a test writes by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from stagemesh_head.registry.rows import ReplicaKey, ReplicaRow, ReplicaState

Listener = Callable[[ReplicaKey, ReplicaRow | None], None]


class StaticMembership:
    """Rows as the test sets them; a broken link makes a READY replica SUSPECT, an open one heals it."""

    def __init__(self) -> None:
        self._rows: dict[ReplicaKey, ReplicaRow] = {}
        self._listeners: list[Listener] = []
        self.link_log: list[tuple[ReplicaKey, bool]] = []

    def rows(self) -> Iterable[ReplicaRow]:
        return list(self._rows.values())

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def link_changed(self, key: ReplicaKey, incarnation: str, up: bool, reason: str) -> None:
        self.link_log.append((key, up))
        row = self._rows.get(key)
        if row is None or row.incarnation != incarnation:
            return
        if not up and row.state is ReplicaState.READY:
            self.put(replace(row, state=ReplicaState.SUSPECT, reason=reason))
        elif up and row.state is ReplicaState.SUSPECT:
            self.put(replace(row, state=ReplicaState.READY, reason=""))

    def put(self, row: ReplicaRow) -> None:
        """Add or change a row."""
        self._rows[row.key] = row
        for listener in list(self._listeners):
            listener(row.key, row)

    def ready(self, pipeline: str, stage: str, replica_id: int, endpoint: str, incarnation: str) -> None:
        """A replica process is READY at `endpoint`."""
        key = ReplicaKey(pipeline, stage, replica_id)
        self.put(ReplicaRow(key, incarnation, "node", ReplicaState.READY, endpoint=endpoint))

    def state(self, key: ReplicaKey, state: ReplicaState, reason: str = "") -> None:
        """Change a row's state."""
        self.put(replace(self._rows[key], state=state, reason=reason))

    def remove(self, key: ReplicaKey) -> None:
        """Forget a row."""
        del self._rows[key]
        for listener in list(self._listeners):
            listener(key, None)

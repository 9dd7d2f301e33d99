"""What an operator may set about membership."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SUSPECT_AFTER_INTERVALS = 2.5
"""Heartbeats may be this late, in intervals, before a node is SUSPECT: two lost ones and some jitter."""


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """Times are seconds."""

    heartbeat_interval_s: float = 1.0
    lease_s: float = 10.0
    """A node without heartbeats for that long is GONE."""
    link_timeout_s: float | None = None
    """A replica that the head cannot reach for that long, though its node is well, is replaced; None: three leases."""
    settle_s: float | None = None
    """After a restart of the head, free slots wait that long for the nodes that had them; None: one lease."""
    gone_rows_s: float = 600.0
    """Rows of nodes and replicas that are GONE are kept that long for people."""
    hello_timeout_s: float = 10.0
    """A session that says nothing is closed after that long."""
    drain_grace_s: float = 60.0
    """Longest time for running tasks when an order names none."""
    reserved: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(pipeline, stage) -> slots, from 0, that only nodes with the label `stagemesh.local=true` get."""
    mesh_id: str = ""
    """Name of the mesh in every answer; empty: made from the pipelines' names."""
    max_nodes: int = 10_000
    max_sessions: int = 20_000
    """Open Join calls, also those that have not said Hello."""

    def __post_init__(self) -> None:
        if self.heartbeat_interval_s <= 0:
            raise ValueError(f"heartbeat interval: {self.heartbeat_interval_s} s: must be above 0")
        if self.lease_s <= SUSPECT_AFTER_INTERVALS * self.heartbeat_interval_s:
            raise ValueError(
                f"heartbeat timeout: {self.lease_s} s: must be above {SUSPECT_AFTER_INTERVALS} heartbeat intervals "
                f"({SUSPECT_AFTER_INTERVALS * self.heartbeat_interval_s:g} s), or every late heartbeat loses the node"
            )

        if self.link_timeout_s is not None and not self.link_timeout_s > 0:
            raise ValueError(f"link timeout: {self.link_timeout_s} s: must be above 0")

    @property
    def unreachable_after_s(self) -> float:
        """How long a link to a replica of a live node may stay broken, at first."""
        return 3 * self.lease_s if self.link_timeout_s is None else self.link_timeout_s

    @property
    def suspect_after_s(self) -> float:
        """Age of the last heartbeat at which a node is SUSPECT."""
        return SUSPECT_AFTER_INTERVALS * self.heartbeat_interval_s

    @property
    def restart_settle_s(self) -> float:
        """How long a restarted head waits for the nodes it does not know yet."""
        return self.lease_s if self.settle_s is None else self.settle_s

    @property
    def tick_s(self) -> float:
        """How often the clock looks at the leases."""
        return min(0.25, self.heartbeat_interval_s / 4)

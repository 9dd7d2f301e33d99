"""What a node agent is told when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of one node agent. Times are seconds."""

    head: str
    """host:port of the head."""
    stages: tuple[str, ...] = ()
    """Stages it is willing to run; empty: any."""
    pipeline: str = ""
    """Their pipeline, where the head serves several."""
    max_replicas: int = 0
    """0: as many as the devices hold."""
    node_id: str = ""
    """Stable across restarts; empty: the host's name."""
    devices: tuple[str, ...] = ()
    """Devices to offer; empty: all."""
    cores_per_device: int | None = None
    """Cores in each CPU core set; None: chosen."""
    listen_host: str = "127.0.0.1"
    """Where replicas listen."""
    advertise_host: str = ""
    """Where others reach them; empty: found out."""
    health_listen: str = ""
    """host:port of a health service for probes; empty: none."""
    drain_timeout_s: float = 30.0
    """For running tasks at the end."""
    give_up_after_s: float | None = None
    """Without a head for so long, the node drains and ends; None: it waits for ever."""
    ready_file: Path | None = None
    """Is there while the node is joined, and holds its id."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """For people and placement."""

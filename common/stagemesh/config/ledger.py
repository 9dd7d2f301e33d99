"""The memory ledger of a device: what the stages on it ask for, against what it has (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagemesh.config.errors import ConfigError
from stagemesh.config.model import Stage

DEFAULT_UTILIZATION = {"llm": 0.9}
"""Share of a device that a stage takes when it says nothing, by type; others take none in advance."""
RESERVE_BYTES = 512 << 20
"""Per replica, beside its share: context, libraries and fragmentation."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Claim:
    """What one replica asks of a device."""

    replica: str
    share: float
    """Of the capacity, 0 to 1."""
    reserve_bytes: int


def claim_of(stage: Stage, replica_id: int) -> Claim:
    """A replica's claim on each of its devices."""
    share = stage.engine_args.get("gpu_memory_utilization", DEFAULT_UTILIZATION.get(stage.stage_type, 0.0))
    return Claim(f"{stage.name}/{replica_id}", float(share), RESERVE_BYTES)


def check_ledger(device: str, capacity_bytes: int, claims: Sequence[Claim]) -> None:
    """Refuse claims that do not fit one device; nothing is refused when the capacity cannot be read (0).

    Raises:
        ConfigError: with the ledger.
    """
    asked = sum(claim.share * capacity_bytes + claim.reserve_bytes for claim in claims)
    if not capacity_bytes or asked <= capacity_bytes:
        return
    rows = ", ".join(
        f"{claim.replica} {claim.share * capacity_bytes / GIB:.1f} + {claim.reserve_bytes / GIB:.1f}"
        for claim in claims
    )
    raise ConfigError(
        f"{device} has {capacity_bytes / GIB:.1f} GiB, asked for are {asked / GIB:.1f}: {rows}",
        hint="lower gpu_memory_utilization, or give the stages other devices",
    )

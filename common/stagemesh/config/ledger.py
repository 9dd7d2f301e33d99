"""The memory ledger of a device: what the stages on it ask for, against what it has (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stagemesh.config.errors import ConfigError
from stagemesh.config.model import Stage
from stagemesh.config.overrides import VLLM_DEFAULTS

RESERVE_BYTES = 256 << 20
"""Per replica, beside what it asks for: the device's context and the libraries' own memory."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Claim:
    """What one replica asks of each of its devices."""

    replica: str
    """`stage/id`."""
    share: float = 0.0
    """Of the capacity, 0 to 1."""
    fixed_bytes: int = 0
    """Asked for in bytes."""
    reserve_bytes: int = RESERVE_BYTES

    def of(self, capacity_bytes: int) -> int:
        """Bytes of a device of that capacity, the reserve among them."""
        return round(self.share * capacity_bytes) + self.fixed_bytes + self.reserve_bytes


def claim_of(stage: Stage, replica_id: int) -> Claim:
    """A replica's claim on each of its devices.

    An engine of vLLM takes a share of the device, `gpu_memory_utilization`; what it gets beside its weights becomes its
    KV cache, unless `kv_cache_memory_bytes` says how large that is. Other engines claim what they say, else nothing.
    """
    name = f"{stage.name}/{replica_id}"
    share = stage.engine_args.get("gpu_memory_utilization")
    cache = stage.engine_args.get("kv_cache_memory_bytes")
    if isinstance(cache, int) and not isinstance(cache, bool):
        return Claim(name, fixed_bytes=cache)
    if share is None:
        share = VLLM_DEFAULTS["gpu_memory_utilization"] if stage.engine == "vllm" else 0.0
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        path = f"stages[{stage.stage_id}].engine_args.gpu_memory_utilization"
        raise ConfigError("want a share from 0 to 1", path=path, value=share)
    return Claim(name, share=float(share))


def fits(capacity_bytes: int, claims: Iterable[Claim]) -> bool:
    """Whether the claims fit one device; always when its capacity cannot be read (0)."""
    return not capacity_bytes or sum(claim.of(capacity_bytes) for claim in claims) <= capacity_bytes


def show_ledger(device: str, capacity_bytes: int, claims: Sequence[Claim]) -> list[str]:
    """The ledger as lines: a claim each, then the sum."""
    width = max(len(name) for name in ("in all", *(claim.replica for claim in claims)))
    lines = []
    for claim in claims:
        asked = f"{claim.share:.0%} of it" if claim.share else f"{claim.fixed_bytes / GIB:.2f} GiB"
        size = claim.of(capacity_bytes) / GIB
        lines.append(f"{device}: {claim.replica:<{width}} {size:8.2f} GiB  ({asked} + {claim.reserve_bytes / GIB:.2f})")
    total = sum(claim.of(capacity_bytes) for claim in claims) / GIB
    lines.append(f"{device}: {'in all':<{width}} {total:8.2f} GiB of {capacity_bytes / GIB:.2f}")
    return lines


def check_ledger(device: str, capacity_bytes: int, claims: Sequence[Claim]) -> None:
    """Refuse claims that do not fit one device.

    Raises:
        ConfigError: with the ledger, in one line.
    """
    if fits(capacity_bytes, claims):
        return
    asked = sum(claim.of(capacity_bytes) for claim in claims)
    rows = ", ".join(f"{claim.replica} {claim.of(capacity_bytes) / GIB:.2f}" for claim in claims)
    raise ConfigError(
        f"{device} has {capacity_bytes / GIB:.2f} GiB, asked for are {asked / GIB:.2f}: {rows}",
        hint="lower gpu_memory_utilization, or give the stages other devices",
    )

"""CPU cores in sets, so that device assignment means something on a machine without accelerators, too."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from stagemesh.v1 import device_pb2 as device_pb

MAX_DEFAULT_SETS = 8
"""A machine with more cores than this is split into so many sets, unless told otherwise: a core alone runs no model."""


class InventoryError(ValueError):
    """The devices asked for are not there; the text says what there is."""


def core_sets(cores: Sequence[int], per_set: int | None = None) -> list[device_pb.Device]:
    """`cores` as devices `cpu:0`, `cpu:1`, ...

    Raises:
        InventoryError: fewer cores than a set is to have.
    """
    name, memory = _cpu_name(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        device_pb.Device(
            id=f"cpu:{number}", kind=device_pb.DEVICE_KIND_CPU, name=name, memory_bytes=memory, cores=members
        )
        for number, members in enumerate(split_cores(cores, per_set))
    ]


def split_cores(cores: Sequence[int], per_set: int | None = None) -> list[Sequence[int]]:
    """Split core numbers into sets of neighbours.

    With `per_set`, as many sets of that size as there can be; cores left over are in none. Else one core each up to
    8, and 8 sets as even as can be from there on.

    Raises:
        InventoryError: fewer cores than a set is to have.
    """
    if per_set is not None:
        if not 1 <= per_set <= len(cores):
            raise InventoryError(f"--cores-per-device {per_set}: this node has {len(cores)} cores: want 1 to that many")
        return [cores[start : start + per_set] for start in range(0, len(cores) - per_set + 1, per_set)]
    sets = min(len(cores), MAX_DEFAULT_SETS)
    bounds = [len(cores) * number // sets for number in range(sets + 1)]
    return [cores[start:end] for start, end in itertools.pairwise(bounds)]


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """How many cores' time this process's cgroups allow; None when they set no limit."""
    quotas = []
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                group = root / path.lstrip("/")
                # Each level above may be the narrower one.
                for level in (group, *group.parents):
                    if level != root and root not in level.parents:
                        break
                    quotas.append(_ratio(_read(level / "cpu.max")))
            elif "cpu" in controllers.split(","):
                folder = root / "cpu" / path.lstrip("/")
                quotas.append(_ratio(f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"))
    known = [quota for quota in quotas if quota is not None]
    return min(known) if known else None


def _ratio(text: str) -> float | None:
    """Quota over period; "max" and -1 mean none."""
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine

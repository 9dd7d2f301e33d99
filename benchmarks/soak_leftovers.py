"""What requests left behind in a mesh of processes, and how large its processes are; seen from outside."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from stagemesh.client.admin import AdminClient
from tests.mesh.faults.processes import Processes

SETTLE_S = 20.0
"""For what was stopped last to be confirmed, released and reported: loads come every half second."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What is still there of requests that are over."""

    requests: int
    """Open in the head."""
    bindings: int
    """Tasks that the head has bound to replicas: each has a slot."""
    tasks: int
    """Tasks that replicas run or keep waiting."""
    tensors: int
    """Shared-memory segments of the replicas."""

    @property
    def is_clean(self) -> bool:
        """Whether there is nothing."""
        return not (self.requests or self.bindings or self.tasks or self.tensors)


@dataclass(slots=True)
class Sizes:
    """Resident memory, threads and open files of the head and each replica, by name."""

    mib: dict[str, float] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        names = (f"{name} {size:.1f} MiB, {self.files[name]} files" for name, size in self.mib.items())
        return "; ".join(names)


class Census:
    """Looks at one mesh whose head is process `head_pid`."""

    def __init__(self, mesh: Processes, head_pid: int) -> None:
        self._mesh = mesh
        self._watched = {"head": psutil.Process(head_pid)}
        for row in mesh.replicas():
            replica = row.report.replica
            self._watched[f"{replica.stage}/{replica.replica_id}"] = psutil.Process(row.report.pid)

    def look(self) -> Leftovers:
        """Count now."""
        with AdminClient(self._mesh.address) as admin:
            requests = admin.list_requests()
            rows = admin.list_replicas()[0]
        pids = {str(process.pid) for process in self._watched.values()}
        return Leftovers(
            requests=len(requests),
            bindings=sum(row.inflight for row in rows),
            tasks=sum(row.report.load.running + row.report.load.waiting for row in rows),
            tensors=sum(path.name.split("-")[1] in pids for path in Path("/dev/shm").glob("stagemesh-*-*")),
        )

    async def settled(self) -> Leftovers:
        """What is left when nothing changes for the better any more; clean as soon as it is."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            left = await asyncio.to_thread(self.look)
            if left.is_clean or time.monotonic() > deadline:
                return left
            await asyncio.sleep(POLL_S)

    def sizes(self) -> Sizes:
        """Measure now."""
        sizes = Sizes()
        for name, process in self._watched.items():
            sizes.mib[name] = process.memory_info().rss / (1 << 20)
            sizes.threads[name] = process.num_threads()
            sizes.files[name] = process.num_fds()
        return sizes

    def dead(self) -> list[str]:
        """Names of processes that are gone: nobody killed them."""
        return [name for name, process in self._watched.items() if not process.is_running()]

"""All links of a replica: what one engine does for several heads and gateways."""

from __future__ import annotations

import asyncio

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_worker.engines.base import Engine
from stagemesh_worker.replica.keeper import Keeper
from stagemesh_worker.replica.link import Link
from stagemesh_worker.replica.tasks import RunningTask, TaskContext


class Links:
    """Opens links, and tells all of them what concerns all of them."""

    def __init__(self, context: TaskContext, keeper: Keeper, probe_epoch: str) -> None:
        """`probe_epoch` is the head epoch by which this process's own probe is known."""
        self._context = context
        self._keeper = keeper
        self._probe_epoch = probe_epoch
        self._links: set[Link] = set()
        self._ending: set[RunningTask] = set()
        self._draining = False

    @property
    def engine(self) -> Engine:
        """The engine behind the links."""
        return self._context.engine

    @property
    def max_concurrency(self) -> int:
        """Tasks the engine works on at once; 0 when it has no bound."""
        return self.engine.max_concurrency

    @property
    def tasks(self) -> list[RunningTask]:
        """Tasks whose work is not over, of closed links too."""
        return [*(task for link in self._links for task in link.tasks), *self._ending]

    def open(self, head_epoch: str) -> Link:
        """A new link."""
        link = Link(self._context, self._keeper, is_probe=head_epoch == self._probe_epoch)
        link.draining = self._draining
        self._links.add(link)
        return link

    def closed(self, link: Link) -> None:
        """A link's stream is over; its tasks were told to stop and are waited for here."""
        self._links.discard(link)
        for task in link.tasks:
            self._ending.add(task)
            task.work.add_done_callback(lambda _, task=task: self._ending.discard(task))  # type: ignore[misc]

    def report_load(self, load: replica_pb.ReplicaLoad) -> None:
        """Tell every head."""
        for link in self._links:
            link.outbox.set_load(load)

    def fail_all(self, error: MeshError) -> None:
        """Fail all tasks, as when the engine died."""
        for link in self._links:
            link.fail_all(error)

    async def drain(self, grace_s: float) -> None:
        """Take nothing new and wait for what runs; what is left after `grace_s` fails with DRAINING."""
        self._draining = True
        for link in self._links:
            link.draining = True
        if tasks := self.tasks:
            await asyncio.wait([task.work for task in tasks], timeout=grace_s)
        self.fail_all(MeshError(Reason.DRAINING, f"the replica drained and the task was not done within {grace_s:g} s"))
        await self.settle(5.0)

    async def settle(self, timeout_s: float) -> None:
        """Wait until the engine let go of all tasks and their last events are out."""
        if tasks := self.tasks:
            await asyncio.wait([task.work for task in tasks], timeout=timeout_s)
        for link in self._links:
            await link.outbox.flushed(timeout_s)

"""One Execute stream: commands in, events out. When it ends, every task of it is aborted."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_worker.replica.keeper import Keeper
from stagemesh_worker.replica.outbox import Outbox
from stagemesh_worker.replica.sink import SlotSink
from stagemesh_worker.replica.tasks import RunningTask, TaskContext

log = logging.getLogger(__name__)

MAX_TASKS = 8192
"""Tasks of one link; the head's admission keeps far below it."""


class Link:
    """The tasks of one head on this replica."""

    def __init__(self, context: TaskContext, keeper: Keeper, *, is_probe: bool) -> None:
        self.outbox = Outbox()
        self.is_probe = is_probe
        self.draining = False
        self._context = context
        self._keeper = keeper
        self._slots: dict[int, RunningTask] = {}
        self._running: set[RunningTask] = set()

    @property
    def tasks(self) -> list[RunningTask]:
        """Tasks whose work is not over."""
        return list(self._running)

    async def read(self, requests: AsyncIterator[stage_pb.ExecuteRequest]) -> None:
        """Carry out commands until the peer says no more. Raises MeshError when it breaks the protocol."""
        async for request in requests:
            for submit in request.submits:
                self._submit(submit)
            for append in request.appends:
                # A chunk may cross the task's end on its way here: that is no error.
                if (task := self._slots.get(append.slot)) is not None:
                    task.append(append)
            for abort in request.aborts:
                if (task := self._slots.get(abort.slot)) is not None:
                    name, reason = task.submit.request_id, abort.reason or "no reason given"
                    log.debug("request %s: aborted: %s", name, reason, extra={"request_id": name})
                    task.abort()
            for grant in request.credits:
                if (task := self._slots.get(grant.slot)) is not None:
                    task.sink.grant(grant.units)

    def close(self) -> None:
        """The stream is over."""
        self._keeper.drop(self.outbox.close())
        for task in self.tasks:
            task.sink.closed()
            task.abort()

    def fail_all(self, error: MeshError) -> None:
        """Fail every task, as when the engine died."""
        for task in self.tasks:
            task.fail(error)

    def _submit(self, submit: stage_pb.SubmitTask) -> None:
        slot = submit.slot
        if slot in self._slots:
            raise invalid("slot", slot, "is still taken by the task before: wait for its terminal event")
        sink = SlotSink(
            submit,
            self.outbox,
            self._keeper,
            on_end=lambda: self._free(slot),
            on_error=lambda error: task.fail(error),
        )
        if self.draining:
            sink.failed(MeshError(Reason.DRAINING, "the replica takes no new work because it drains"))
            return
        if len(self._running) >= MAX_TASKS:
            sink.failed(MeshError(Reason.OVERLOADED, f"the replica has {MAX_TASKS} tasks", limit=MAX_TASKS))
            return
        task = RunningTask(submit, sink, self._context, self.is_probe)
        self._slots[slot] = task
        self._running.add(task)
        task.work.add_done_callback(lambda _: self._running.discard(task))

    def _free(self, slot: int) -> None:
        self._slots.pop(slot, None)

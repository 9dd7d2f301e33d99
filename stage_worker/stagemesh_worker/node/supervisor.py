"""All replicas of a node: assigned, revoked and reported by slot."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from typing import Any

from stagemesh.tensors import segments
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_worker.node.locks import DeviceLocks
from stagemesh_worker.node.slot import ReplicaHost, ReplicaSlot
from stagemesh_worker.rundir import sweep_run_directories

log = logging.getLogger("stagemesh.node")

SlotKey = tuple[str, str, int]
"""Pipeline, stage, replica id."""


class Supervisor:
    """Runs what the head assigns, and says what it runs."""

    def __init__(self, host: ReplicaHost, locks: DeviceLocks | None = None) -> None:
        self.changed = asyncio.Event()
        """Set at every change of a report, for the session to send it."""
        self._host = host
        self._locks = locks or DeviceLocks()
        self._slots: dict[SlotKey, ReplicaSlot] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def reports(self) -> list[replica_pb.ReplicaReport]:
        """What runs here, also what has failed and waits for the head's word."""
        return [slot.report for slot in self._slots.values()]

    @property
    def is_ready(self) -> bool:
        """Something runs here, and all of it is READY."""
        reports = self.reports()
        return bool(reports) and all(report.state == replica_pb.REPLICA_STATE_READY for report in reports)

    @property
    def wedged(self) -> list[str]:
        """Names of the replicas that make no progress."""
        return [
            slot.name for slot in self._slots.values() if slot.report.state == replica_pb.REPLICA_STATE_SUSPECT
        ]

    def assign(self, assignment: registry_pb.Assignment) -> None:
        """Run a replica. The same assignment again is the same replica; another one for its slot replaces it."""
        key = _key(assignment.replica)
        slot = self._slots.get(key)
        if slot is not None and not slot.is_over and _is_same(slot.assignment, assignment):
            return
        if slot is not None:
            self._do(self._replace(slot, assignment))
            return
        self._start(assignment)

    def _start(self, assignment: registry_pb.Assignment) -> None:
        devices = ", ".join(device.id for device in assignment.devices) or "no device"
        log.info("[%s/%d] assigned: %s", assignment.replica.stage, assignment.replica.replica_id, devices)
        slot = ReplicaSlot(assignment, self._host, self._locks, self.changed.set)
        self._slots[_key(assignment.replica)] = slot

    async def _replace(self, slot: ReplicaSlot, assignment: registry_pb.Assignment) -> None:
        await self._end(slot, 0.0)
        self._start(assignment)

    def revoke(self, revocation: registry_pb.Revocation) -> None:
        """Drain and end a replica; it is reported no more once it is gone. Unknown ones are gone already."""
        slot = self._slots.get(_key(revocation.replica))
        wanted = revocation.replica.incarnation
        if slot is None or (wanted and wanted != slot.report.replica.incarnation):
            return
        log.info("[%s] revoked: %s", slot.name, revocation.reason or "no reason given")
        self._do(self._end(slot, revocation.grace.ToNanoseconds() / 1e9))

    async def _end(self, slot: ReplicaSlot, grace_s: float) -> None:
        if grace_s > 0:
            await slot.drain(grace_s)
        await slot.stop()
        if self._slots.get(_key(slot.assignment.replica)) is slot:
            del self._slots[_key(slot.assignment.replica)]
        self.sweep()
        self.changed.set()

    async def stop(self, grace_s: float) -> None:
        """Drain and end everything."""
        await asyncio.gather(*(self._end(slot, grace_s) for slot in list(self._slots.values())))

    def sweep(self) -> None:
        """Remove what killed processes left: sockets in run directories and segments in shared memory."""
        try:
            left = [*map(str, sweep_run_directories()), *segments.sweep()]
        except OSError as error:
            log.warning("sweeping: %s", error)
            return
        if left:
            log.info("swept what dead processes left: %s", ", ".join(left))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _key(ref: replica_pb.ReplicaRef) -> SlotKey:
    return ref.pipeline, ref.stage, ref.replica_id


def _is_same(one: registry_pb.Assignment, other: registry_pb.Assignment) -> bool:
    return (
        one.pipeline_revision == other.pipeline_revision
        and json.loads(one.stage_config_json) == json.loads(other.stage_config_json)
        and [device.id for device in one.devices] == [device.id for device in other.devices]
    )

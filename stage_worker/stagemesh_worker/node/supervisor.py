"""All replicas of a node: carries out what their lives ask for, and tells them what happened."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_worker.node import sweeping
from stagemesh_worker.node.lifecycle import LifeLimits, Place, ReplicaLife, Step
from stagemesh_worker.node.locks import DeviceBusy, DeviceLocks
from stagemesh_worker.node.orders import Kill, Lock, Order, Release, Spawn, Tell, Terminate
from stagemesh_worker.node.replica_process import ReplicaProcess
from stagemesh_worker.node.reports import report_of
from stagemesh_worker.replica import control

log = logging.getLogger(__name__)

TICK_S = 0.2
STALL_S = 1.0
"""A tick that comes so much later than it should means that this process stood still."""
CLOSE_S = 10.0
"""For killed replicas to be gone at the end."""

SlotKey = tuple[str, str, int]
"""Pipeline, stage, replica id."""
OnLine = Callable[[str, int, str], None]
"""Stage, replica id, line of output."""


@dataclass(slots=True, eq=False)
class _Slot:
    life: ReplicaLife
    process: ReplicaProcess | None = None
    locking: asyncio.Task[None] | None = None
    locks: tuple[str, ...] = ()
    successor: registry_pb.Assignment | None = None
    """What takes its place once it is gone."""
    logged: tuple[object, ...] = ()


class Supervisor:
    """Runs what the head assigns, and says what it runs."""

    def __init__(self, place: Place, locks: DeviceLocks, on_line: OnLine, *, limits: LifeLimits = LifeLimits()) -> None:
        self.changed = asyncio.Event()
        """Set whenever there is something new to report."""
        self.empty = asyncio.Event()
        """Set while nothing runs here."""
        self.empty.set()
        self.draining = False
        """It takes nothing new, and never will again."""
        self._place = place
        self._locks = locks
        self._on_line = on_line
        self._limits = limits
        self._slots: dict[SlotKey, _Slot] = {}
        self._gone: list[replica_pb.ReplicaReport] = []
        self._owned: set[asyncio.Task[None]] = set()
        self._sweeping = False

    # ---------------------------------------------------------------- what the node says

    def reports(self) -> list[replica_pb.ReplicaReport]:
        """All replicas, and those that went since `forget_gone`."""
        return [*(report_of(slot.life) for slot in self._slots.values()), *self._gone]

    def forget_gone(self, reported: Sequence[replica_pb.ReplicaReport]) -> None:
        """The head knows these now."""
        known = {report.replica.incarnation for report in reported}
        self._gone = [report for report in self._gone if report.replica.incarnation not in known]

    @property
    def is_ready(self) -> bool:
        """Something runs here, and all of it serves."""
        return bool(self._slots) and all(
            slot.life.state == replica_pb.REPLICA_STATE_READY for slot in self._slots.values()
        )

    # ---------------------------------------------------------------- what the head orders

    def assign(self, assignment: registry_pb.Assignment) -> None:
        """Run a replica. The same assignment again is the same replica; another one for its slot replaces it."""
        key = _key(assignment.replica)
        if self.draining:
            log.info("%s: not taken: the node drains", _name(key))
            return
        slot = self._slots.get(key)
        if slot is None:
            self._begin(key, assignment)
        elif slot.life.step in (Step.DRAINING, Step.STOPPING):
            slot.successor = assignment
        elif not _is_same(slot.life.assignment, assignment):
            log.info("%s: assigned anew: the one before it stops", _name(key))
            slot.successor = assignment
            self._follow(slot, slot.life.revoke(0.0, time.monotonic()))

    def revoke(self, revocation: registry_pb.Revocation) -> None:
        """Drain and end a replica. Unknown ones are gone already; an earlier incarnation is, too."""
        key = _key(revocation.replica)
        slot, wanted = self._slots.get(key), revocation.replica.incarnation
        if slot is None or (wanted and wanted != slot.life.incarnation):
            log.info("%s: revoked (%s), but gone already", _name(key), revocation.reason or "no reason given")
            return
        grace_s = revocation.grace.ToNanoseconds() / 1e9
        log.info("%s: revoked: %s", slot.life.name, revocation.reason or "no reason given")
        slot.successor = None
        self._follow(slot, slot.life.revoke(grace_s, time.monotonic()))

    def close_doors(self) -> None:
        """Take nothing new, and have the head told; what runs goes on."""
        self.draining = True
        self.changed.set()

    def drain(self, grace_s: float) -> None:
        """End everything, running tasks within `grace_s` seconds; `empty` tells when it is done."""
        self.close_doors()
        for slot in list(self._slots.values()):
            slot.successor = None
            self._follow(slot, slot.life.revoke(grace_s, time.monotonic()))

    def hurry(self) -> None:
        """End everything at once."""
        self.close_doors()
        for slot in list(self._slots.values()):
            slot.successor = None
            self._follow(slot, slot.life.hurry(time.monotonic()))

    # ---------------------------------------------------------------- its own life

    async def run(self) -> None:
        """Let time pass for the replicas, until cancelled."""
        self._sweep()
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            away_s, last = now - last - TICK_S, now
            if away_s >= STALL_S:
                log.warning("the node agent stood still for %.1f s", away_s)
            for slot in list(self._slots.values()):
                if away_s >= STALL_S:
                    slot.life.stalled(away_s)
                self._follow(slot, slot.life.tick(now))

    async def close(self) -> None:
        """Kill what still runs, and remove what it left."""
        self.hurry()
        processes = [slot.process for slot in self._slots.values() if slot.process is not None]
        for process in processes:
            process.kill()
        if processes:
            _, late = await asyncio.wait([process.task for process in processes], timeout=CLOSE_S)
            for task in late:
                log.error("%s does not end", task.get_name())
        for task in [*self._owned]:
            task.cancel()
        await asyncio.gather(*self._owned, return_exceptions=True)
        await asyncio.to_thread(sweeping.sweep)

    # ---------------------------------------------------------------- one slot

    def _begin(self, key: SlotKey, assignment: registry_pb.Assignment) -> None:
        stage, problem = _parse(assignment)
        life = ReplicaLife(assignment, stage, self._place, limits=self._limits)
        devices = ", ".join(device.id for device in assignment.devices) or "no device"
        log.info("%s: assigned, on %s", life.name, devices)
        slot = self._slots[key] = _Slot(life)
        self.empty.clear()
        if problem is not None:
            life.refuse(problem)
        self._follow(slot, life.begin() if problem is None else [])

    def _follow(self, slot: _Slot, orders: Sequence[Order]) -> None:
        """Carry out orders, and see what has become of the replica."""
        for order in orders:
            match order:
                case Lock():
                    slot.locking = self._own(self._lock(slot, order.timeout_s), f"locks of {slot.life.name}")
                case Release():
                    self._release(slot)
                case Spawn():
                    self._spawn(slot, order.assign)
                case Tell() if slot.process is not None:
                    slot.process.tell(order.message)
                case Terminate() if slot.process is not None:
                    slot.process.terminate()
                case Kill() if slot.process is not None:
                    slot.process.kill()
        self._note(slot)
        if slot.life.step is Step.GONE:
            self._remove(slot)

    async def _lock(self, slot: _Slot, timeout_s: float) -> None:
        def waits(holder: str) -> None:
            slot.life.lock_waits(holder)
            log.warning("%s: waits for %s", slot.life.name, holder)
            self.changed.set()

        try:
            slot.locks = await self._locks.acquire(slot.life.assignment.devices, timeout_s, waits)
        except DeviceBusy as error:
            self._follow(slot, slot.life.lock_failed(str(error)))
        except OSError as error:
            text = f"its devices cannot be locked: {error.filename or self._locks.directory}: {error.strerror}"
            self._follow(slot, slot.life.lock_folder_failed(text, time.monotonic()))
        else:
            self._follow(slot, slot.life.locked(time.monotonic()))

    def _release(self, slot: _Slot) -> None:
        if slot.locking is not None and slot.locking is not asyncio.current_task():
            slot.locking.cancel()
        slot.locking = None
        self._locks.release(slot.locks)
        slot.locks = ()

    def _spawn(self, slot: _Slot, assign: control.Assign) -> None:
        life, ref = slot.life, slot.life.assignment.replica

        def heard(message: control.Message) -> None:
            self._follow(slot, life.heard(message, time.monotonic()))

        def ended(code: int) -> None:
            lines, slot.process = list(process.tail), None
            self._follow(slot, life.ended(code, lines, time.monotonic()))
            self._sweep()

        try:
            process = ReplicaProcess(
                life.name,
                assign,
                on_message=heard,
                on_line=lambda line: self._on_line(ref.stage, ref.replica_id, line),
                on_end=ended,
                inherit=self._locks.descriptors(slot.locks),
            )
        except OSError as error:
            self._follow(slot, life.spawn_failed(str(error), time.monotonic()))
            return
        slot.process = process
        self._locks.note_replica(slot.locks, life.name, process.pid)
        life.spawned(process.pid, time.monotonic())

    def _remove(self, slot: _Slot) -> None:
        key = _key(slot.life.assignment.replica)
        if self._slots.get(key) is not slot:
            return
        del self._slots[key]
        self._gone.append(report_of(slot.life))
        self.changed.set()
        if slot.successor is not None and not self.draining:
            self._begin(key, slot.successor)
        elif not self._slots:
            self.empty.set()

    def _note(self, slot: _Slot) -> None:
        """Log what changed, and have it reported."""
        life = slot.life
        error = life.error.message if life.error is not None else ""
        seen = (life.step, life.incarnation, life.phase, error)
        if seen == slot.logged:
            return
        # While it starts again, the reason is that of the end before, and in the log already.
        is_news = bool(error) and life.step is not Step.STARTING
        slot.logged = seen
        self.changed.set()
        state = replica_pb.ReplicaState.Name(life.state).removeprefix("REPLICA_STATE_")
        where = f" at {life.endpoint}" if life.step is Step.SERVING and not error else ""
        # The lines below the first are the process's own, which are in the log already.
        parts = [life.phase, error.partition("\n")[0] if is_news else ""]
        why = "".join(f": {part}" for part in parts if part)
        log.log(logging.WARNING if is_news else logging.INFO, "%s: %s%s%s", life.name, state, where, why)

    # ---------------------------------------------------------------- helpers

    def _sweep(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            self._own(self._sweep_once(), "sweep")

    async def _sweep_once(self) -> None:
        try:
            await asyncio.to_thread(sweeping.sweep)
        finally:
            self._sweeping = False

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._owned.add(task)
        task.add_done_callback(self._disown)
        return task

    def _disown(self, task: asyncio.Task[None]) -> None:
        self._owned.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: %s", task.get_name(), error, exc_info=error)


def _parse(assignment: registry_pb.Assignment) -> tuple[dict[str, Any], MeshError | None]:
    try:
        stage = json.loads(assignment.stage_config_json)
    except ValueError as error:
        return {}, MeshError(Reason.BAD_STAGE_CONFIG, f"stage_config_json: not JSON: {error}")
    if not isinstance(stage, dict) or not isinstance(stage.get("runtime", {}), dict):
        return {}, MeshError(Reason.BAD_STAGE_CONFIG, "stage_config_json: want a JSON object, as a stage's schema says")
    return stage, None


def _key(ref: replica_pb.ReplicaRef) -> SlotKey:
    return ref.pipeline, ref.stage, ref.replica_id


def _name(key: SlotKey) -> str:
    return f"{key[1]}/{key[2]}"


def _is_same(one: registry_pb.Assignment, other: registry_pb.Assignment) -> bool:
    return one.pipeline_revision == other.pipeline_revision and [device.id for device in one.devices] == [
        device.id for device in other.devices
    ]

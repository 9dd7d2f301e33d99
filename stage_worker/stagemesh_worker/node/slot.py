"""One assigned replica: started, watched, started again, drained and ended."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from google.rpc import status_pb2

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_worker.node.locks import DeviceBusy, DeviceLocks
from stagemesh_worker.node.replica_process import ReplicaProcess
from stagemesh_worker.node.restarts import RestartPolicy
from stagemesh_worker.replica import control

log = logging.getLogger("stagemesh.node")

SILENT_S = 5.0
"""A replica reports about once a second; silent for so long, it hangs or is stopped."""
STUCK_FACTOR = 2.0
"""A replica that stays unhealthy for this many times its own progress timeout is started anew."""
STOP_S = 10.0
"""For a replica to end by itself once told to stop."""
SHOWN_LINES = 8
"""Lines of the engine's output that go into an error."""


@dataclass(frozen=True, slots=True)
class ReplicaHost:
    """What all replicas of a node are told."""

    listen_host: str
    advertise_host: str
    host_id: str


class ReplicaSlot:
    """An assignment of the head, and whatever runs for it."""

    def __init__(
        self,
        assignment: registry_pb.Assignment,
        host: ReplicaHost,
        locks: DeviceLocks,
        on_change: Callable[[], None],
        policy: RestartPolicy | None = None,
    ) -> None:
        self.assignment = assignment
        self.name = f"{assignment.replica.stage}/{assignment.replica.replica_id}"
        self._host = host
        self._locks = locks
        self._on_change = on_change
        self._policy = policy or RestartPolicy()
        self._stage = json.loads(assignment.stage_config_json)
        self._stuck_s = float(self._stage.get("runtime", {}).get("stuck_after", 60.0))
        self._process: ReplicaProcess | None = None
        self._drained = asyncio.Event()
        self._ending = False
        self._served_since: float | None = None
        self._heard_at = 0.0
        self._unhealthy_since: float | None = None
        self._said_unhealthy = ""
        self._failure: control.Failed | None = None
        self.report = replica_pb.ReplicaReport(
            replica=assignment.replica,
            pipeline_revision=assignment.pipeline_revision,
            device_ids=[device.id for device in assignment.devices],
        )
        """What the node says of it. Its incarnation is that of the process."""
        self._new_incarnation()
        self._task = asyncio.create_task(self._supervise(), name=f"replica {self.name}")

    # ------------------------------------------------------------------ what the node asks

    @property
    def is_over(self) -> bool:
        """Nothing of it runs, and nothing will."""
        return self._task.done()

    async def drain(self, grace_s: float) -> None:
        """Let its tasks finish for up to `grace_s` seconds; returns when they have, or time is up."""
        if self.report.state not in (replica_pb.REPLICA_STATE_READY, replica_pb.REPLICA_STATE_SUSPECT):
            return
        self._ending = True
        self._set(replica_pb.REPLICA_STATE_DRAINING, "")
        if self._process is not None:
            await self._process.tell(control.Drain(grace_s))
        try:
            async with asyncio.timeout(grace_s + 1.0):
                await self._drained.wait()
        except TimeoutError:
            log.warning("[%s] still had work after a drain of %.0f s", self.name, grace_s)

    async def stop(self) -> None:
        """End it, by itself if it can, and free its devices."""
        self._ending = True
        process = self._process
        if process is not None:
            await process.tell(control.Stop())
        try:
            async with asyncio.timeout(STOP_S if process is not None else 0.1):
                await asyncio.shield(self._task)
        except TimeoutError:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ------------------------------------------------------------------ life

    def _new_incarnation(self) -> None:
        self.report.replica.incarnation = secrets.token_hex(8)
        self.report.ClearField("load")
        self.report.endpoint = ""
        self._served_since = self._unhealthy_since = self._failure = None
        self._said_unhealthy = ""
        self._drained.clear()
        self._set(replica_pb.REPLICA_STATE_STARTING, "waiting for its devices")

    async def _supervise(self) -> None:
        timeout_s = self.assignment.start_timeout.ToNanoseconds() / 1e9 or 300.0
        names: tuple[str, ...] = ()
        try:
            names = await self._locks.acquire(self.assignment.devices, timeout_s)
            while not self._ending:
                error = await self._run_once(timeout_s)
                if self._ending:
                    break
                served_s = 0.0 if self._served_since is None else time.monotonic() - self._served_since
                is_fatal = self._failure is not None and self._failure.fatal
                delay = None if is_fatal else self._policy.crashed(time.monotonic(), served_s)
                if delay is None:
                    self._fail(error)
                    return
                log.warning("[%s] ended: %s; starts again in %.1f s", self.name, error.message, delay)
                self.report.restarts += 1
                self._new_incarnation()
                self._set(replica_pb.REPLICA_STATE_STARTING, "waits before it starts again", error)
                await asyncio.sleep(delay)
        except DeviceBusy as error:
            self._fail(MeshError(Reason.START_FAILED, str(error)))
        except OSError as error:
            self._fail(MeshError(Reason.START_FAILED, f"cannot be started: {error}"))
        finally:
            self._locks.release(names)
            if self._ending:
                self._set(replica_pb.REPLICA_STATE_GONE, "")

    async def _run_once(self, timeout_s: float) -> MeshError:
        """Run one process to its end; returns why it ended."""
        process = self._process = await ReplicaProcess.spawn(self.name, self._assign())
        self.report.pid = process.pid
        self._heard_at = time.monotonic()
        self._set(replica_pb.REPLICA_STATE_STARTING, "starting its process")
        watch = asyncio.create_task(self._watch(timeout_s), name=f"watch {self.name}")
        listen = asyncio.create_task(process.listen(self._hear), name=f"listen {self.name}")
        try:
            await asyncio.wait({watch, listen}, return_when=asyncio.FIRST_COMPLETED)
            verdict = watch.result() if watch.done() else None
        finally:
            for task in (watch, listen):
                task.cancel()
            await asyncio.gather(watch, listen, return_exceptions=True)
            code = await process.end()
            self._process = None
            self.report.pid = 0
        return verdict or self._why_ended(process, code)

    async def _watch(self, timeout_s: float) -> MeshError:
        """Look after a running process; returns when it must be ended, and why."""
        deadline = time.monotonic() + timeout_s
        while True:
            await asyncio.sleep(0.25)
            now = time.monotonic()
            if self._served_since is None:
                if now >= deadline:
                    return MeshError(
                        Reason.START_FAILED,
                        f"not ready after {timeout_s:.0f} s, last seen {self.report.phase!r}{self._last_lines()}",
                    )
                continue
            silent_s = now - self._heard_at
            self._judge(now, silent_s)
            if self._unhealthy_since is not None and now - self._unhealthy_since > self._stuck_s * STUCK_FACTOR:
                return MeshError(Reason.ENGINE_STUCK, f"{self.report.error.message}; it was started anew")

    def _judge(self, now: float, silent_s: float) -> None:
        """SUSPECT while it is silent or says so itself, READY again as soon as neither is true."""
        if silent_s > SILENT_S:
            why = f"the replica process has not answered for {silent_s:.0f} s"
        else:
            why = self._said_unhealthy
        if why and self.report.state == replica_pb.REPLICA_STATE_READY:
            self._unhealthy_since = now
            log.warning("[%s] suspect: %s", self.name, why)
            self._set(replica_pb.REPLICA_STATE_SUSPECT, "", MeshError(Reason.ENGINE_STUCK, why))
        elif not why and self.report.state == replica_pb.REPLICA_STATE_SUSPECT:
            self._unhealthy_since = None
            log.info("[%s] answers again", self.name)
            self._set(replica_pb.REPLICA_STATE_READY, "")

    def _hear(self, message: control.Message) -> None:
        self._heard_at = time.monotonic()
        if isinstance(message, control.Phase):
            self._set(self.report.state, message.phase)
        elif isinstance(message, control.Ready):
            self._served_since = self._heard_at
            self.report.endpoint = message.endpoint
            log.info("[%s] ready at %s", self.name, message.endpoint)
            self._set(replica_pb.REPLICA_STATE_READY, "")
        elif isinstance(message, control.Load):
            self._take_load(message)
        elif isinstance(message, control.Unhealthy):
            self._said_unhealthy = message.reason
        elif isinstance(message, control.Healthy):
            self._said_unhealthy = ""
        elif isinstance(message, control.Failed):
            self._failure = message
        elif isinstance(message, control.Drained):
            self._drained.set()

    def _take_load(self, message: control.Load) -> None:
        load = self.report.load
        load.running, load.waiting = message.running, message.waiting
        load.kv_cache_usage, load.engine_steps = message.kv_cache_usage, message.engine_steps
        load.since_progress.FromNanoseconds(int(message.since_progress_s * 1e9))
        load.memory_bytes = message.memory_bytes

    # ------------------------------------------------------------------ words

    def _assign(self) -> control.Assign:
        ref = self.report.replica
        return control.Assign(
            pipeline=ref.pipeline,
            pipeline_revision=self.assignment.pipeline_revision,
            stage=self._stage,
            replica_id=ref.replica_id,
            incarnation=ref.incarnation,
            devices=tuple(
                control.AssignedDevice(device.id, tuple(device.cores), device.physical_id)
                for device in self.assignment.devices
            ),
            listen_host=self._host.listen_host,
            advertise_host=self._host.advertise_host,
            host_id=self._host.host_id,
            progress_timeout_s=self._stuck_s,
        )

    def _why_ended(self, process: ReplicaProcess, code: int) -> MeshError:
        if self._failure is not None:
            known = self._failure.reason in Reason.__members__
            return MeshError(Reason(self._failure.reason) if known else Reason.START_FAILED, self._failure.message)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return MeshError(Reason.REPLICA_LOST, f"the replica process {how}{self._last_lines(process)}")

    def _last_lines(self, process: ReplicaProcess | None = None) -> str:
        process = process or self._process
        lines = [line for line in (process.tail if process else ()) if line.strip()][-SHOWN_LINES:]
        return "; its last lines: " + " | ".join(lines) if lines else ""

    def _fail(self, error: MeshError) -> None:
        log.error("[%s] failed: %s", self.name, error.message)
        self._set(replica_pb.REPLICA_STATE_FAILED, "", error)

    def _set(self, state: replica_pb.ReplicaState.ValueType, phase: str, error: MeshError | None = None) -> None:
        self.report.state = state
        self.report.phase = phase
        self.report.error.CopyFrom(error.to_status() if error is not None else status_pb2.Status())
        if error is None:
            self.report.ClearField("error")
        self._on_change()

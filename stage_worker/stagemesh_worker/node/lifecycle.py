"""The life of one assigned replica as a state machine: (event, now) -> orders. No process, no clock, no task.

    LOCKING -> STARTING -> SERVING -> DRAINING -> STOPPING -> GONE
                  ^   \\       |
               PAUSING <- FAILING -> FAILED

`now` is a monotonic time in seconds. Each event returns what is to be done about it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_worker.node import failures
from stagemesh_worker.node.orders import Kill, Lock, Order, Release, Spawn, Tell, Terminate
from stagemesh_worker.node.restarts import RestartPolicy
from stagemesh_worker.replica import control


class Step(Enum):
    """Where a replica stands, as its node knows it."""

    LOCKING = auto()
    """Waits for its devices."""
    STARTING = auto()
    """Its process runs and loads."""
    SERVING = auto()
    """It passed its self-probe; it may be suspect."""
    FAILING = auto()
    """Its process is about to end, and will be started again."""
    PAUSING = auto()
    """Nothing runs; it starts again soon."""
    DRAINING = auto()
    """It finishes what it has."""
    STOPPING = auto()
    """Its process was told to end for good."""
    FAILED = auto()
    """Given up; the head may move it."""
    GONE = auto()
    """Over, as the head or the node's end wanted it."""


@dataclass(frozen=True, slots=True)
class LifeLimits:
    """Bounds in seconds."""

    silent_s: float = 5.0
    """A replica reports every half second; silent for so long, its process is stopped or starved."""
    exit_s: float = 15.0
    """For a process to end by itself after it said that it failed."""
    stop_s: float = 10.0
    """For a process to end by itself after it was told to."""
    hurry_s: float = 2.0
    """The same when the node is in a hurry."""
    drain_margin_s: float = 1.0
    """Over a drain's grace, for the answer to arrive."""
    lock_retry_s: float = 2.0
    """Between two tries where the lock folder cannot be used now: a full disk is freed by and by."""


@dataclass(frozen=True, slots=True)
class Place:
    """What all replicas of a node are told about where they are."""

    listen_host: str
    advertise_host: str
    host_id: str


class ReplicaLife:
    """One assignment of the head, from its first start to its end."""

    def __init__(
        self,
        assignment: registry_pb.Assignment,
        stage: dict[str, Any],
        place: Place,
        *,
        limits: LifeLimits = LifeLimits(),
        policy: RestartPolicy | None = None,
        new_incarnation: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """
        Args:
            stage: the assignment's configuration, parsed.
        """
        self.assignment = assignment
        self.name = f"{assignment.replica.stage}/{assignment.replica.replica_id}"
        self.step = Step.LOCKING
        self.incarnation = new_incarnation()
        self.pid = 0
        self.restarts = 0
        self.phase = ""
        self.error: MeshError | None = None
        """Why it is suspect, starts again, or was given up."""
        self._stage = stage
        self._place = place
        self._limits = limits
        self._policy = policy or RestartPolicy()
        self._new_incarnation = new_incarnation
        self._start_timeout_s = assignment.start_timeout.ToNanoseconds() / 1e9 or 300.0
        # Read here without the configuration's own model, which would bring its libraries into every node agent.
        self._stuck_after_s = float((stage.get("runtime") or {}).get("stuck_after") or 60.0)
        self.endpoint = ""
        """host:port, once it serves."""
        self.load: control.Load | None = None
        """What it last said of its work."""
        self._heard_at = 0.0
        self._served_since: float | None = None
        self._unhealthy = ""
        self._failure: MeshError | None = None
        self._is_fatal = False
        self._retries_lock = False
        """FAILED as it is, it still tries for its devices."""
        self._deadline: float | None = None
        """When the present step has taken too long."""

    # ---------------------------------------------------------------- starting

    def begin(self) -> list[Order]:
        """It was assigned."""
        self.phase = "waiting for its devices"
        return [Lock(self._start_timeout_s)]

    def refuse(self, error: MeshError) -> None:
        """The assignment cannot be read: there is nothing to start."""
        self._give_up(error)

    def lock_waits(self, holder: str) -> None:
        """Somebody else has one of its devices."""
        if self.step is Step.LOCKING:
            self.phase = f"waiting for {holder}"

    def locked(self, now: float) -> list[Order]:
        """It has its devices."""
        return self._start(now) if self._wants_lock else []

    def lock_failed(self, text: str) -> list[Order]:
        """It does not get its devices."""
        if not self._wants_lock:
            return []
        self._retries_lock = False
        return self._give_up(MeshError(Reason.START_FAILED, text))

    def lock_folder_failed(self, text: str, now: float) -> list[Order]:
        """The lock files cannot be used now. It is FAILED, so that the head may move it, and tries again."""
        orders = self.lock_failed(text)
        if orders:
            self._retries_lock, self._deadline = True, now + self._limits.lock_retry_s
        return orders

    @property
    def _wants_lock(self) -> bool:
        return self.step is Step.LOCKING or (self.step is Step.FAILED and self._retries_lock)

    def spawned(self, pid: int, now: float) -> list[Order]:
        """Its process runs."""
        self.pid = pid
        self._heard_at = now
        return []

    def spawn_failed(self, text: str, now: float) -> list[Order]:
        """The system refused to start its process."""
        self._failure = MeshError(Reason.START_FAILED, f"the replica process cannot be started: {text}")
        return self._over((), now)

    def _start(self, now: float) -> list[Order]:
        self.step, self.phase, self._retries_lock = Step.STARTING, "starting its process", False
        self._deadline = now + self._start_timeout_s
        return [Spawn(self._assign())]

    def _assign(self) -> control.Assign:
        ref = self.assignment.replica
        has_threshold = self.assignment.HasField("tensor_threshold_bytes")
        return control.Assign(
            pipeline=ref.pipeline,
            pipeline_revision=self.assignment.pipeline_revision,
            stage=self._stage,
            replica_id=ref.replica_id,
            incarnation=self.incarnation,
            devices=tuple(
                control.AssignedDevice(device.id, tuple(device.cores), device.physical_id)
                for device in self.assignment.devices
            ),
            listen_host=self._place.listen_host,
            advertise_host=self._place.advertise_host,
            host_id=self._place.host_id,
            progress_timeout_s=self._stuck_after_s,
            tensor_threshold_bytes=(
                self.assignment.tensor_threshold_bytes if has_threshold else control.TENSOR_THRESHOLD_BYTES
            ),
        )

    # ---------------------------------------------------------------- what the process says

    def heard(self, message: control.Message, now: float) -> list[Order]:
        """Its process said something."""
        self._heard_at = now
        match message:
            case control.Phase() if self.step is Step.STARTING:
                self.phase = message.phase
            case control.Ready() if self.step is Step.STARTING:
                self.step, self.phase, self.error = Step.SERVING, "", None
                self.endpoint, self._served_since, self._deadline = message.endpoint, now, None
            case control.Load():
                self.load = message
            case control.Unhealthy():
                self._unhealthy = message.reason
            case control.Healthy():
                self._unhealthy = ""
            case control.Failed() if self.step in (Step.STARTING, Step.SERVING):
                self._is_fatal = message.fatal
                return self._fail(failures.reported(message), now + self._limits.exit_s)
            case control.Drained() if self.step is Step.DRAINING:
                return self._stop(now, self._limits.stop_s)
        self._judge(now)
        return []

    def ended(self, exit_code: int, lines: Sequence[str], now: float) -> list[Order]:
        """Its process and all that it started are gone; `lines` are its last ones, oldest first."""
        self.pid = 0
        if self.step in (Step.DRAINING, Step.STOPPING):
            return self._leave()
        if self._failure is None:
            self._failure = failures.unannounced(exit_code, has_served=self._served_since is not None)
        return self._over(lines, now)

    # ---------------------------------------------------------------- failing

    def _fail(self, error: MeshError, deadline: float) -> list[Order]:
        """The process is done for: wait for its end until `deadline`."""
        self.step, self.phase, self._deadline = Step.FAILING, "ending its process", deadline
        self._failure = self.error = error
        return []

    def _over(self, lines: Sequence[str], now: float) -> list[Order]:
        """A process ended that should not have: start another, or give up."""
        assert self._failure is not None
        served_s = None if self._served_since is None else now - self._served_since
        delay_s = None if self._is_fatal else self._policy.crashed(now, served_s)
        if delay_s is None:
            return self._give_up(failures.with_lines(self._failure, lines, self._policy.verdict))
        self.error = failures.with_lines(self._failure, lines)
        self.restarts += 1
        self.incarnation = self._new_incarnation()
        self.endpoint, self.load, self._served_since = "", None, None
        self._unhealthy, self._failure = "", None
        self.step, self._deadline = Step.PAUSING, now + delay_s
        self.phase = f"starts again in {delay_s:.1f} s"
        return []

    def _give_up(self, error: MeshError) -> list[Order]:
        self.step, self.phase, self.error, self._deadline = Step.FAILED, "", error, None
        self.endpoint, self.load = "", None
        return [Release()]

    # ---------------------------------------------------------------- time

    def tick(self, now: float) -> list[Order]:
        """Time went by."""
        is_late = self._deadline is not None and now >= self._deadline
        match self.step:
            case Step.STARTING if is_late:
                text = f"not ready after {self._start_timeout_s:.0f} s; the last that it did: {self.phase}"
                self._fail(MeshError(Reason.START_FAILED, text), now + self._limits.exit_s)
                return [Kill()]
            case Step.SERVING:
                self._judge(now)
                silent_s = now - self._heard_at
                if silent_s >= max(self._stuck_after_s, self._limits.silent_s):
                    text = f"the replica process said nothing for {silent_s:.0f} s"
                    self._fail(MeshError(Reason.ENGINE_STUCK, text), now + self._limits.exit_s)
                    return [Kill()]
            case Step.PAUSING if is_late:
                return self._start(now)
            case Step.FAILED if is_late:
                self._deadline = None
                return [Lock(self._start_timeout_s)]
            case Step.FAILING | Step.STOPPING if is_late:
                self._deadline = now + self._limits.exit_s
                return [Kill()]
            case Step.DRAINING if is_late:
                return self._stop(now, self._limits.stop_s)
        return []

    def stalled(self, away_s: float) -> None:
        """The node agent itself stood still for so long: what its replicas said meanwhile waits in the sockets."""
        self._heard_at += away_s

    def _judge(self, now: float) -> None:
        """Suspect while it is silent or says so itself."""
        if self.step is not Step.SERVING:
            return
        why = self._unhealthy
        if now - self._heard_at >= self._limits.silent_s:
            silent_s = f"{self._limits.silent_s:g} s"
            why = f"the replica process has not answered for {silent_s}: it is stopped, or gets no time to run"
        if (self.error.message if self.error else "") != why:
            self.error = MeshError(Reason.ENGINE_STUCK, why) if why else None

    # ---------------------------------------------------------------- ending

    def revoke(self, grace_s: float, now: float) -> list[Order]:
        """It is to go, its tasks within `grace_s` seconds. A second order may only shorten the first."""
        match self.step:
            case Step.SERVING if grace_s > 0:
                self.step, self._deadline = Step.DRAINING, now + grace_s + self._limits.drain_margin_s
                return [Tell(control.Drain(grace_s))]
            case Step.DRAINING if grace_s > 0:
                assert self._deadline is not None
                self._deadline = min(self._deadline, now + grace_s + self._limits.drain_margin_s)
                return []
            case Step.STARTING | Step.SERVING | Step.FAILING | Step.DRAINING:
                return self._stop(now, self._limits.stop_s)
            case Step.LOCKING | Step.PAUSING | Step.FAILED:
                return self._leave()
        return []

    def hurry(self, now: float) -> list[Order]:
        """It is to go at once."""
        orders = self.revoke(0.0, now)
        if self.step is Step.STOPPING:
            self._deadline = min(self._deadline or now, now + self._limits.hurry_s)
        return orders

    def _stop(self, now: float, within_s: float) -> list[Order]:
        orders: list[Order] = [Tell(control.Stop())]
        if self._served_since is None:
            # While it loads it may not read its messages; there is no task that could be cut off.
            orders.append(Terminate())
        self.step, self.phase, self._deadline = Step.STOPPING, "stopping", now + within_s
        return orders

    def _leave(self) -> list[Order]:
        self.step, self.phase, self._deadline = Step.GONE, "", None
        self.error, self.endpoint, self.load = None, "", None
        return [Release()]

    # ---------------------------------------------------------------- words

    @property
    def state(self) -> replica_pb.ReplicaState.ValueType:
        """What the head is told."""
        match self.step:
            case Step.SERVING:
                return replica_pb.REPLICA_STATE_SUSPECT if self.error else replica_pb.REPLICA_STATE_READY
            case Step.FAILING if self._served_since is not None:
                return replica_pb.REPLICA_STATE_SUSPECT
            case Step.DRAINING | Step.STOPPING:
                return replica_pb.REPLICA_STATE_DRAINING
            case Step.FAILED:
                return replica_pb.REPLICA_STATE_FAILED
            case Step.GONE:
                return replica_pb.REPLICA_STATE_GONE
        return replica_pb.REPLICA_STATE_STARTING

"""One `Join` call: introduced, renewed, listened to, until it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import registry_pb2_grpc as registry_rpc
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_worker.node.lease import SILENT_SHARE, Lease
from stagemesh_worker.node.supervisor import Supervisor

log = logging.getLogger(__name__)

WELCOME_S = 10.0
"""For the head to answer Hello, a new connection included."""
GOODBYE_S = 2.0
MIN_GAP_S = 0.02
"""Changes that come closer than this go in one heartbeat."""
DEFAULT_INTERVAL_S, DEFAULT_LEASE_S = 1.0, 10.0
"""For a head that names none."""


@dataclass(frozen=True, slots=True)
class Events:
    """Whom a session tells."""

    joined: Callable[[registry_pb.Welcome], None]
    drain: Callable[[float, str], None]
    """The head wants the node to leave: grace in seconds, reason."""


class Session:
    """A node's side of one Join call."""

    def __init__(
        self, channel: grpc.aio.Channel, hello: registry_pb.Hello, supervisor: Supervisor, events: Events
    ) -> None:
        self.lease: Lease | None = None
        """Once the head has said Welcome."""
        self.scaled: Sequence[registry_pb.ScaledStage] | None = None
        """What the head's operators ordered, once it has answered a heartbeat; it is told to the next head."""
        self._stub = registry_rpc.RegistryServiceStub(channel)
        self._hello = hello
        self._supervisor = supervisor
        self._events = events
        self._goodbye: str | None = None
        self._sequence = self._answered = 0
        self._problems: frozenset[str] = frozenset()
        self._answer = asyncio.Event()
        self._gone: dict[int, list[replica_pb.ReplicaReport]] = {}
        """Heartbeat -> replicas that it reported as GONE."""

    async def heard_out(self) -> None:
        """Wait until the head has answered a heartbeat that begins now: it knows all there is to know."""
        wanted = self._sequence + 1
        self._supervisor.changed.set()
        while self._answered < wanted:
            self._answer.clear()
            await self._answer.wait()

    def leave(self, reason: str) -> None:
        """Say Goodbye and end. Nothing that comes later is reported."""
        self._goodbye = reason
        self._supervisor.changed.set()

    async def run(self) -> None:
        """Until it ends; returns when it ended with Goodbye.

        Raises:
            MeshError: how it ended else: the head's words, or UNREACHABLE when it fell silent.
        """
        call: Any = self._stub.Join()
        tasks: list[asyncio.Task[None]] = []
        try:
            lease = self.lease = await self._introduce(call)
            tasks = [
                asyncio.create_task(self._renew(call, lease), name="renew the lease"),
                asyncio.create_task(self._listen(call, lease), name="listen to the head"),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # When both are over, the head's word says more than the failed write.
            for task in sorted((task for task in tasks if task.done()), key=tasks.index, reverse=True):
                task.result()
            if self._goodbye is None:
                raise MeshError(Reason.UNREACHABLE, "the head ended the session")
        except (grpc.RpcError, asyncio.InvalidStateError) as error:  # the second: written to a call that had ended
            raise await _how_it_ended(call, error) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _introduce(self, call: Any) -> Lease:
        now = time.monotonic()
        try:
            async with asyncio.timeout(WELCOME_S):
                await call.write(registry_pb.JoinRequest(hello=self._hello))
                first = await call.read()
        except TimeoutError:
            raise MeshError(Reason.UNREACHABLE, f"it does not answer within {WELCOME_S:.0f} s") from None
        if first is grpc.aio.EOF:
            raise await _how_it_ended(call, None)
        if not first.HasField("welcome"):
            raise MeshError(Reason.INTERNAL, f"it answered hello with {first.WhichOneof('message')}, not with welcome")
        welcome = first.welcome
        self._events.joined(welcome)
        return Lease(
            welcome.heartbeat_interval.ToNanoseconds() / 1e9 or DEFAULT_INTERVAL_S,
            welcome.lease_duration.ToNanoseconds() / 1e9 or DEFAULT_LEASE_S,
            now,
        )

    async def _renew(self, call: Any, lease: Lease) -> None:
        """Heartbeats: before the lease demands one, and at once when something changed."""
        supervisor = self._supervisor
        while self._goodbye is None:
            supervisor.changed.clear()
            self._sequence += 1
            sequence = self._sequence
            reports = supervisor.reports()
            if gone := [report for report in reports if report.state == replica_pb.REPLICA_STATE_GONE]:
                self._gone[sequence] = gone
            beat = registry_pb.Heartbeat(
                sequence=sequence,
                incarnation=self._hello.incarnation,
                replicas=reports,
                draining=supervisor.draining,
            )
            lease.sent(sequence, time.monotonic())
            # A write waits when the peer reads nothing: that is bounded as a missing answer is.
            try:
                async with asyncio.timeout(lease.lease_s / 2):
                    await call.write(registry_pb.JoinRequest(heartbeat=beat))
            except TimeoutError:
                raise _silent(lease) from None
            await asyncio.sleep(MIN_GAP_S)
            await self._until_due(lease)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await call.write(registry_pb.JoinRequest(goodbye=registry_pb.Goodbye(reason=self._goodbye)))
                await call.done_writing()
                await call.code()

    async def _until_due(self, lease: Lease) -> None:
        """Wait for the next heartbeat's time, or for news. Raises MeshError when the head is silent for too long."""
        wait_s = max(0.0, lease.due_at() - time.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._supervisor.changed.wait()
        if lease.is_silent(time.monotonic()):
            raise _silent(lease)

    async def _listen(self, call: Any, lease: Lease) -> None:
        """Carry out what the head orders, until it ends the call."""
        while (message := await call.read()) is not grpc.aio.EOF:
            match message.WhichOneof("message"):
                case "heartbeat_ack":
                    sequence = message.heartbeat_ack.sequence
                    lease.answered(sequence)
                    self._answered = max(self._answered, sequence)
                    self._answer.set()
                    self.scaled = message.heartbeat_ack.scaled
                    self._note_problems(message.heartbeat_ack.problems)
                    for number in [number for number in self._gone if number <= sequence]:
                        self._supervisor.forget_gone(self._gone.pop(number))
                case "assignment":
                    self._supervisor.assign(message.assignment)
                case "revocation":
                    self._supervisor.revoke(message.revocation)
                case "drain":
                    self._events.drain(message.drain.grace.ToNanoseconds() / 1e9, message.drain.reason)
                case kind:
                    log.warning("the head sent %s, which this version does not know", kind)
        if await call.code() is not grpc.StatusCode.OK:
            raise await _how_it_ended(call, None)

    def _note_problems(self, problems: Sequence[str]) -> None:
        """Log what the head cannot do with this node's replicas, each trouble once while it lasts."""
        for problem in problems:
            if problem not in self._problems:
                log.warning("%s (is --advertise-host right, and the way open?)", problem)
        self._problems = frozenset(problems)


def _silent(lease: Lease) -> MeshError:
    return MeshError(Reason.UNREACHABLE, f"it has not answered for {lease.lease_s * SILENT_SHARE:.1f} s", silent=True)


async def _how_it_ended(call: Any, error: BaseException | None) -> MeshError:
    """The status of a call that is over, as an error. A call that is not over met an error of its own."""
    if isinstance(error, grpc.RpcError):
        return MeshError.from_rpc_error(error)
    if not call.done() and error is not None:
        return MeshError.from_exception(error)
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return MeshError(Reason.UNREACHABLE, "the head ended the session")
    return MeshError.from_rpc_error(
        grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata(), await call.details())
    )

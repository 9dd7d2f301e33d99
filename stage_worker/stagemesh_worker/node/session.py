"""The node's side of `Join`: introduced, renewed, taken up again whenever it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import grpc

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import open_channel
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import registry_pb2_grpc as registry_rpc
from stagemesh_worker.node.supervisor import Supervisor

log = logging.getLogger("stagemesh.node")

WELCOME_S = 10.0
"""For the head to answer Hello."""
BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
GOODBYE_S = 2.0
MIN_GAP_S = 0.02
"""Changes that come closer than this go in one heartbeat."""
HOPELESS = frozenset({Reason.VERSION_MISMATCH, Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED})
"""Refusals that the same node will hear again: it tries slowly."""
SLOW_S = 5.0


class HeadSession:
    """Keeps a node joined to its head."""

    def __init__(
        self,
        target: str,
        hello: Callable[[], registry_pb.Hello],
        supervisor: Supervisor,
        on_drain: Callable[[float, str], None],
        *,
        give_up_after_s: float | None = None,
    ) -> None:
        """
        Args:
            target: host:port of the head.
            hello: makes the introduction; `running` and `last_head_epoch` are filled here.
            on_drain: the head wants the node to leave: grace in seconds, reason.
            give_up_after_s: seconds without a head after which `run` returns; None: never.
        """
        self.joined = asyncio.Event()
        self.draining = False
        self._target = target
        self._hello = hello
        self._supervisor = supervisor
        self._on_drain = on_drain
        self._give_up_after_s = give_up_after_s
        self._epoch = ""
        self._leaving = asyncio.Event()
        self._said = ""

    async def run(self) -> None:
        """Join, and join again, until `leave`.

        Raises:
            MeshError: the head was away for longer than the node was told to wait.
        """
        failures, lost_at = 0, time.monotonic()
        while not self._leaving.is_set():
            try:
                async with open_channel(self._target) as channel:
                    await self._session(channel)
                error = MeshError(Reason.UNREACHABLE, "the head ended the session")
            except grpc.RpcError as failure:
                error = MeshError.from_rpc_error(failure)
            except MeshError as failure:
                error = failure
            if self.joined.is_set():
                failures, lost_at = 0, time.monotonic()
            self.joined.clear()
            if self._leaving.is_set():
                return
            self._say(error)
            if self._give_up_after_s is not None and time.monotonic() - lost_at > self._give_up_after_s:
                away = f"no head at {self._target} for {self._give_up_after_s:.0f} s"
                raise MeshError(error.reason, f"{away}: {error.message}")
            # Full jitter: the nodes of a restarted head come back spread out.
            ceiling = SLOW_S if error.reason in HOPELESS else min(MAX_BACKOFF_S, BACKOFF_S * 2**failures)
            failures = min(failures + 1, 16)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(0.02, ceiling)):
                    await self._leaving.wait()

    async def leave(self, reason: str) -> None:
        """Say Goodbye and end `run`."""
        self._leave_reason = reason
        self._leaving.set()
        self._supervisor.changed.set()

    _leave_reason = ""

    async def _session(self, channel: grpc.aio.Channel) -> None:
        call: Any = registry_rpc.RegistryServiceStub(channel).Join()
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(WELCOME_S):
                hello = self._hello()
                hello.last_head_epoch = self._epoch
                hello.running.extend(self._supervisor.reports())
                await call.write(registry_pb.JoinRequest(hello=hello))
                first = await call.read()
            if first is grpc.aio.EOF:
                raise MeshError.from_rpc_error(await _ended(call))
            welcome = first.welcome
            self._epoch = welcome.header.head_epoch
            self._said = ""
            interval = welcome.heartbeat_interval.ToNanoseconds() / 1e9
            lease = welcome.lease_duration.ToNanoseconds() / 1e9
            log.info("joined the head at %s (heartbeat every %.1f s, lease %.1f s)", self._target, interval, lease)
            self.joined.set()
            acked = [time.monotonic()]
            tasks = [
                asyncio.create_task(self._send(call, hello.incarnation, interval, lease, acked)),
                asyncio.create_task(self._receive(call, acked)),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except TimeoutError:
            raise MeshError(Reason.UNREACHABLE, f"the head at {self._target} does not answer") from None
        except asyncio.InvalidStateError:  # grpc.aio: written to a call that had ended
            raise MeshError.from_rpc_error(await _ended(call)) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _send(
        self, call: Any, incarnation: str, interval: float, lease: float, acked: list[float]
    ) -> None:
        """Heartbeats: at the interval, and at once when something changed."""
        sequence, changed = 0, self._supervisor.changed
        while True:
            if self._leaving.is_set():
                async with asyncio.timeout(GOODBYE_S):
                    await call.write(registry_pb.JoinRequest(goodbye=registry_pb.Goodbye(reason=self._leave_reason)))
                    await call.done_writing()
                    await call.code()
                return
            changed.clear()
            sequence += 1
            beat = registry_pb.Heartbeat(
                sequence=sequence,
                incarnation=incarnation,
                replicas=self._supervisor.reports(),
                draining=self.draining,
            )
            async with asyncio.timeout(lease):
                await call.write(registry_pb.JoinRequest(heartbeat=beat))
            if time.monotonic() - acked[0] > lease:
                raise MeshError(Reason.UNREACHABLE, f"the head at {self._target} has not answered for {lease:.0f} s")
            await asyncio.sleep(MIN_GAP_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, interval - MIN_GAP_S)):
                    await changed.wait()

    async def _receive(self, call: Any, acked: list[float]) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            acked[0] = time.monotonic()
            kind = message.WhichOneof("message")
            if kind == "assignment":
                self._supervisor.assign(message.assignment)
            elif kind == "revocation":
                self._supervisor.revoke(message.revocation)
            elif kind == "drain":
                self._on_drain(message.drain.grace.ToNanoseconds() / 1e9, message.drain.reason)
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            raise MeshError.from_rpc_error(await _ended(call))

    def _say(self, error: MeshError) -> None:
        """Each trouble once, not at every try."""
        text = f"no session with the head at {self._target}: {error.message}"
        if text != self._said:
            self._said = text
            log.warning("%s; trying again", text)


async def _ended(call: Any) -> grpc.aio.AioRpcError:
    """The status of a call that has ended, as the error it would raise."""
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )

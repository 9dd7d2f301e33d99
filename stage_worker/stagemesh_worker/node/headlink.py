"""Keeps a node joined to its head: joins, and joins again whenever the session ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import grpc

from stagemesh.rpc.backoff import Backoff
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import open_channel
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_worker.node.lease import Lease
from stagemesh_worker.node.session import Events, Session
from stagemesh_worker.node.supervisor import Supervisor

log = logging.getLogger(__name__)

BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
"""For a head that is away: the nodes of a restarted one come back spread out, and soon."""
REFUSED_BACKOFF_S, MAX_REFUSED_BACKOFF_S = 1.0, 15.0
"""For a head that says no: what is in the way may go, but seldom at once."""
FRESH_CHANNEL_EVERY = 20
"""Failures after which a new channel is opened, which reads certificates anew."""
STABLE_S = 5.0
"""A session that lasted for so long was a success; one that the head ends at once is a failure like others."""
REFUSALS = frozenset(
    {
        Reason.NODE_REFUSED,
        Reason.INVALID_REQUEST,
        Reason.UNKNOWN_PIPELINE,
        Reason.UNKNOWN_STAGE,
        Reason.UNAUTHENTICATED,
        Reason.PERMISSION_DENIED,
        Reason.UNSUPPORTED,
    }
)
HOPELESS = frozenset({Reason.VERSION_MISMATCH})
"""No waiting helps: another version must be installed."""


class HeadLink:
    """A node's standing connection to its head."""

    def __init__(
        self,
        target: str,
        hello: Callable[[], registry_pb.Hello],
        supervisor: Supervisor,
        on_drain: Callable[[float, str], None],
        *,
        on_joined: Callable[[bool], None] = lambda joined: None,
        give_up_after_s: float | None = None,
    ) -> None:
        """
        Args:
            target: host:port of the head.
            hello: makes the introduction; `running`, `last_head_epoch` and `scaled` are filled in here.
            on_drain: the head wants the node to leave: grace in seconds, reason.
            on_joined: told whenever the node joins (True) and whenever it is cut off (False).
            give_up_after_s: seconds without a session after which `run` ends; None: never.
        """
        self._target = target
        self._hello = hello
        self._supervisor = supervisor
        self._on_joined = on_joined
        self._give_up_after_s = give_up_after_s
        self._events = Events(self._joined, on_drain)
        self._session: Session | None = None
        self._joined_at: float | None = None
        self._lease: Lease | None = None
        """Of the last session."""
        self._head_epoch = ""
        self._scaled: Sequence[registry_pb.ScaledStage] = ()
        self._leaving = asyncio.Event()
        self._farewell = ""
        self._said = ""
        self._away = Backoff(BACKOFF_S, MAX_BACKOFF_S)
        self._refused = Backoff(REFUSED_BACKOFF_S, MAX_REFUSED_BACKOFF_S)

    async def run(self) -> None:
        """Stay joined until `leave`.

        Raises:
            MeshError: the head can never take this node, or was away for longer than allowed.
        """
        channel = self._open()
        cut_off_at = time.monotonic()
        try:
            while not self._leaving.is_set():
                error = await self._try(channel)
                if self._joined_at is not None:
                    cut_off_at = time.monotonic()
                    if cut_off_at - self._joined_at >= STABLE_S:
                        self._away.reset()
                        self._refused.reset()
                    self._joined_at = None
                    self._on_joined(False)
                if self._leaving.is_set():
                    return
                assert error is not None
                self._tell(error)
                self._check_hope(error, cut_off_at)
                # A connection that carries nothing would carry the next session, too.
                if "silent" in error.metadata or self._away.failures % FRESH_CHANNEL_EVERY == FRESH_CHANNEL_EVERY - 1:
                    await channel.close()
                    channel = self._open()
                await self._pause(error, cut_off_at)
        finally:
            await channel.close()

    async def heard_out(self, timeout_s: float) -> None:
        """Wait until the head knows what there is to report now; for `timeout_s` seconds, and only if it is there."""
        if self._joined_at is not None and self._session is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._session.heard_out()

    async def leave(self, reason: str) -> None:
        """Say Goodbye and end `run`."""
        self._farewell = reason
        self._leaving.set()
        if self._session is not None:
            self._session.leave(reason)

    def _open(self) -> grpc.aio.Channel:
        return open_channel(self._target, own_connection=True)

    async def _try(self, channel: grpc.aio.Channel) -> MeshError | None:
        """One session; returns why it ended, or None after a Goodbye."""
        hello = self._hello()
        hello.last_head_epoch = self._head_epoch
        hello.scaled.extend(self._scaled)
        reports = self._supervisor.reports()
        hello.running.extend(report for report in reports if report.state != replica_pb.REPLICA_STATE_GONE)
        # What Hello leaves out is gone, to a head that knew it.
        self._supervisor.forget_gone(reports)
        session = self._session = Session(channel, hello, self._supervisor, self._events)
        try:
            await session.run()
        except MeshError as error:
            return error
        finally:
            self._session = None
            self._lease = session.lease or self._lease
            self._scaled = self._scaled if session.scaled is None else session.scaled
        return None

    def _joined(self, welcome: registry_pb.Welcome) -> None:
        epoch = welcome.header.head_epoch
        if not self._head_epoch:
            what = "joined"
        else:
            what = "joined again:" if epoch == self._head_epoch else "joined, after its restart,"
        self._head_epoch = epoch
        log.info(
            "%s the head at %s: heartbeat every %.1f s, lease %.1f s",
            what,
            self._target,
            welcome.heartbeat_interval.ToNanoseconds() / 1e9,
            welcome.lease_duration.ToNanoseconds() / 1e9,
        )
        self._said = ""
        self._joined_at = time.monotonic()
        self._on_joined(True)
        if self._leaving.is_set() and self._session is not None:
            self._session.leave(self._farewell)

    def _tell(self, error: MeshError) -> None:
        """Each trouble once, not at every try."""
        first = error.message.partition("\n")[0]
        if error.reason in REFUSALS | HOPELESS:
            text = f"the head at {self._target} refuses this node: {first}"
        else:
            text = f"no session with the head at {self._target}: {first}"
        if text != self._said:
            self._said = text
            log.warning("%s", text)

    def _check_hope(self, error: MeshError, cut_off_at: float) -> None:
        if error.reason in HOPELESS:
            raise error
        limit_s = self._give_up_after_s
        if limit_s is not None and time.monotonic() - cut_off_at >= limit_s:
            raise MeshError(
                Reason.UNREACHABLE, f"no session with the head at {self._target} for {limit_s:g} s: {error.message}"
            )

    async def _pause(self, error: MeshError, cut_off_at: float) -> None:
        if error.reason in REFUSALS:
            pause_s = self._refused.next_s()
        elif error.reason in (Reason.NODE_UNKNOWN, Reason.STALE_INCARNATION) and self._away.failures == 0:
            self._away.next_s()
            pause_s = 0.0  # the head asks for a new session: it is there
        else:
            pause_s = self._away.next_s()
        within_s = self._lease.retry_within_s(time.monotonic()) if self._lease is not None else None
        if within_s is not None and error.reason not in REFUSALS:
            pause_s = min(pause_s, within_s)
        if self._give_up_after_s is not None:
            pause_s = min(pause_s, max(0.0, cut_off_at + self._give_up_after_s - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._leaving.wait()

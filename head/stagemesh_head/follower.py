"""A gateway's membership: it follows the registry of a head, and goes on with its last view while there is none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from stagemesh.config import Pipeline
from stagemesh.rpc.backoff import Backoff
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import open_channel
from stagemesh.v1 import header_pb2 as header_pb
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import registry_pb2_grpc as registry_rpc
from stagemesh_head.registry.rows import ReplicaKey, ReplicaRow, ReplicaState

log = logging.getLogger(__name__)

REJOIN_GRACE_S = 15.0
"""A head that was restarted knows its nodes again within a lease; until then its gateways keep what they knew."""


class Follower:
    """`Membership` by `WatchReplicas`."""

    def __init__(self, head: str) -> None:
        self.epoch = secrets.token_hex(8)
        """This gateway's own; replicas tell its links from the head's by it."""
        self.pipelines: tuple[Pipeline, ...] = ()
        self._head = head
        self._rows: dict[ReplicaKey, ReplicaRow] = {}
        self._listeners: list[Callable[[ReplicaKey, ReplicaRow | None], None]] = []
        self._header = header_pb.ResponseHeader()
        self._seen = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._said = ""
        self._unconfirmed: dict[ReplicaKey, asyncio.TimerHandle] = {}
        """Rows of an earlier head that the present one has not spoken of."""

    async def start(self) -> None:
        """Begin to follow; returns with the first view, however long the head takes to come."""
        self._task = asyncio.create_task(self._follow(), name="follow the head")
        await self._seen.wait()

    async def stop(self) -> None:
        """Follow no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for timer in self._unconfirmed.values():
            timer.cancel()

    def header(self) -> header_pb.ResponseHeader:
        """Where this gateway's view comes from: the head's own header of it."""
        return self._header

    # -- Membership -------------------------------------------------------------
    def rows(self) -> Iterable[ReplicaRow]:
        """All rows of the last view."""
        return list(self._rows.values())

    def subscribe(self, listener: Callable[[ReplicaKey, ReplicaRow | None], None]) -> Callable[[], None]:
        """Call `listener` at every change; returns the unsubscriber."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def link_changed(self, key: ReplicaKey, incarnation: str, up: bool, reason: str) -> None:
        """A gateway's broken link is its own affair: its pools leave the replica out, other gateways' do not."""

    # -- following --------------------------------------------------------------
    async def _follow(self) -> None:
        backoff = Backoff(0.1, 2.0)
        while True:
            try:
                async with open_channel(self._head) as channel:
                    await self._watch(channel, backoff)
                error = MeshError(Reason.UNREACHABLE, "the head ended the watch")
            except grpc.RpcError as failure:
                error = MeshError.from_rpc_error(failure)
            if error.reason is Reason.REVISION_TOO_OLD:
                self._header = header_pb.ResponseHeader()  # a new head, or one that moved on: begin with a snapshot
                continue
            self._say(f"no view of the head at {self._head}: {error.message}; going on with the last one")
            await asyncio.sleep(backoff.next_s())

    async def _watch(self, channel: grpc.aio.Channel, backoff: Backoff) -> None:
        request = registry_pb.WatchReplicasRequest(
            after_revision=self._header.revision, head_epoch=self._header.head_epoch
        )
        call: Any = registry_rpc.RegistryServiceStub(channel).WatchReplicas(request)
        try:
            async for response in call:
                self._take(response)
                backoff.reset()
        finally:
            call.cancel()

    def _take(self, response: registry_pb.WatchReplicasResponse) -> None:
        if response.snapshot:
            self._take_pipelines(response.pipelines_json)
            fresh = {ReplicaKey.of(status.report.replica) for status in response.replicas}
            for key in [key for key in self._rows if key not in fresh]:
                self._miss(key)
        self._header = response.header
        for status in response.replicas:
            row = row_of(status)
            known = self._rows.get(row.key)
            if not row.incarnation and known is not None and row.key in self._unconfirmed:
                continue  # a new head plans the slot anew; the node that has it will say so
            self._confirm(row.key)
            self._rows[row.key] = row
            for listener in list(self._listeners):
                listener(row.key, row)
        for ref in response.removed:
            self._forget(ReplicaKey.of(ref))
        if not self._seen.is_set():
            log.info("following the head at %s: %d replicas", self._head, len(self._rows))
            self._seen.set()
        self._said = ""

    def _take_pipelines(self, texts: Iterable[str]) -> None:
        fresh = tuple(Pipeline.model_validate_json(text) for text in texts)
        if self.pipelines and fresh != self.pipelines:
            log.warning("the head serves other pipelines now: restart this gateway to serve them")
        self.pipelines = self.pipelines or fresh

    def _miss(self, key: ReplicaKey) -> None:
        """A snapshot lacks this row. It may come back: a restarted head hears of its replicas one by one."""
        if key not in self._unconfirmed:
            loop = asyncio.get_running_loop()
            self._unconfirmed[key] = loop.call_later(REJOIN_GRACE_S, self._forget, key)

    def _confirm(self, key: ReplicaKey) -> None:
        timer = self._unconfirmed.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _forget(self, key: ReplicaKey) -> None:
        self._confirm(key)
        if self._rows.pop(key, None) is not None:
            for listener in list(self._listeners):
                listener(key, None)

    def _say(self, text: str) -> None:
        """Each trouble once."""
        if text != self._said:
            self._said = text
            log.warning("%s", text)


def row_of(status: registry_pb.ReplicaStatus) -> ReplicaRow:
    """A row as a watch tells it."""
    report = status.report
    state = ReplicaState.GONE
    with contextlib.suppress(ValueError):
        state = ReplicaState(status.state)
    return ReplicaRow(
        key=ReplicaKey.of(report.replica),
        incarnation=report.replica.incarnation,
        node_id=status.node_id,
        state=state,
        endpoint=report.endpoint,
        pipeline_revision=report.pipeline_revision,
        device_ids=tuple(report.device_ids),
        load=report.load if report.HasField("load") else None,
        phase=report.phase,
        reason=status.reason,
        pid=report.pid,
        restarts=report.restarts,
    )

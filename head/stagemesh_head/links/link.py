"""The head's connection to one replica: one `Execute` stream that carries all its tasks, both ways, in batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc

from stagemesh.rpc.backoff import Backoff
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import open_channel
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import stage_pb2_grpc as stage_rpc
from stagemesh_head.links.outbox import Outbox
from stagemesh_head.links.tasks import TERMINAL_EVENTS, LinkTask
from stagemesh_head.registry.rows import ReplicaKey

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 5.0
"""Longest time from dialling to the replica's LinkReady."""
BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0


class Link:
    """One replica process's link. It opens again after a break, until it is closed.

    A break loses all tasks on it at once: the replica aborts them too, since their stream has ended.
    """

    def __init__(
        self,
        key: ReplicaKey,
        incarnation: str,
        endpoint: str,
        head_epoch: str,
        changed: Callable[[Link, str], None],
    ) -> None:
        """Args: changed: called with the link and a reason whenever `is_up` changes, and when it cannot be opened."""
        self.key = key
        self.incarnation = incarnation
        self.endpoint = endpoint
        self.is_up = False
        self._is_told_down = False
        self.session = 0
        """Grows each time the stream opens."""
        self.reported: int | None = None
        """Tasks, running and waiting, that the replica last told on this link; None: it has not yet."""
        self._head_epoch = head_epoch
        self._changed = changed
        self._slots: dict[int, LinkTask] = {}
        self._free: list[int] = []
        self._resting: list[int] = []
        """Free once the commands that wait are taken: some may be meant for the slot's last task."""
        self._outbox = Outbox()
        self._runner: asyncio.Task[None] | None = None

    @property
    def tasks(self) -> int:
        """Tasks on it now."""
        return len(self._slots)

    def start(self) -> None:
        """Open it in the background."""
        self._runner = asyncio.create_task(self._run(), name=f"link {self.key}")

    async def close(self, reason: str) -> None:
        """Close it for good; its tasks are lost."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
        self._break(MeshError(Reason.REPLICA_LOST, f"replica {self.key}: {reason}", replica=self.key))

    # -- commands -----------------------------------------------------------
    def submit(self, task: LinkTask, command: stage_pb.SubmitTask) -> int:
        """Start a task; returns its slot. Raises MeshError(REPLICA_LOST) when the link is down."""
        if not self.is_up:
            raise MeshError(Reason.REPLICA_LOST, f"replica {self.key}: the link is down", replica=self.key)
        slot = self._free.pop() if self._free else len(self._slots) + len(self._resting) + 1
        self._slots[slot] = task
        command.slot = slot
        self._outbox.pending().submits.append(command)
        return slot

    def append(self, command: stage_pb.AppendInput) -> None:
        """Give a task further input."""
        self._outbox.pending().appends.append(command)

    def abort(self, slot: int, reason: str) -> None:
        """Ask for the end of a task; its terminal event confirms."""
        self._outbox.pending().aborts.add(slot=slot, reason=reason)

    def grant(self, slot: int, units: int) -> None:
        """Let a task send more."""
        self._outbox.pending().credits.add(slot=slot, units=units)

    # -- the stream ---------------------------------------------------------
    async def _run(self) -> None:
        backoff = Backoff(BACKOFF_S, MAX_BACKOFF_S)
        channel = open_channel(self.endpoint, own_connection=True)
        try:
            while True:
                session = self.session
                error = await self._one_session(channel)
                self._break(error)
                if error.reason is Reason.STALE_INCARNATION:
                    log.info("link %s: another process answers at %s", self.key, self.endpoint)
                    return
                if self.session > session:
                    backoff.reset()
                await asyncio.sleep(backoff.next_s())
        finally:
            await channel.close()

    async def _one_session(self, channel: grpc.aio.Channel) -> MeshError:
        """Open the stream and serve it until it breaks; returns why it broke."""
        call = stage_rpc.StageServiceStub(channel).Execute()
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await call.write(self._opening())
                first = await call.read()
            if not isinstance(first, stage_pb.ExecuteResponse) or not first.HasField("ready"):
                raise MeshError(Reason.REPLICA_LOST, f"replica {self.key}: the stream ended before it was ready")
            self._outbox.clear()
            self.session += 1
            self.is_up, self._is_told_down = True, False
            self._changed(self, "link is up")
            writer = asyncio.create_task(self._write(call), name=f"link writer {self.key}")
            await self._read(call)
            return MeshError(Reason.REPLICA_LOST, f"replica {self.key}: its stream ended", replica=self.key)
        except TimeoutError:
            return MeshError(Reason.UNREACHABLE, f"replica {self.key}: no answer from {self.endpoint}")
        except MeshError as error:
            return error
        except grpc.RpcError as error:
            told = MeshError.from_rpc_error(error)
            if told.reason is Reason.STALE_INCARNATION:
                return told
            return MeshError(Reason.REPLICA_LOST, f"replica {self.key}: {told.message}", replica=self.key)
        except Exception as error:
            # Of ours, or a message that is none: the link must open again all the same.
            log.exception("link %s: error inside the head", self.key)
            return MeshError(Reason.REPLICA_LOST, f"replica {self.key}: {type(error).__name__}", replica=self.key)
        finally:
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            call.cancel()

    def _opening(self) -> stage_pb.ExecuteRequest:
        replica = self.key.ref(self.incarnation)
        return stage_pb.ExecuteRequest(open=stage_pb.OpenLink(head_epoch=self._head_epoch, replica=replica))

    async def _write(self, call: Any) -> None:
        # A failed write ends the reader too, which tells the reason: nothing to do here but stop.
        while True:
            message = await self._outbox.take()
            self._free += self._resting
            self._resting.clear()
            await call.write(message)

    async def _read(self, call: Any) -> None:
        """Hand every batch to its tasks. The inner loop is the hot path: it runs once a task and batch."""
        slots = self._slots
        while (batch := await call.read()) is not grpc.aio.EOF:
            if batch.HasField("columns"):
                columns = batch.columns
                token_ids, start = list(columns.token_ids), 0
                for slot, count, text in zip(columns.slots, columns.counts, columns.texts, strict=False):
                    end = start + count
                    task = slots.get(slot)
                    if task is not None:
                        task.on_tokens(token_ids[start:end], text)
                    start = end
            for event in batch.events:
                kind = event.WhichOneof("event")
                task = slots.get(event.slot)
                if task is None or kind is None:
                    continue
                if kind in TERMINAL_EVENTS:
                    del slots[event.slot]
                    (self._free if self._outbox.is_empty else self._resting).append(event.slot)
                task.on_event(kind, event)
            if batch.HasField("load"):
                self.reported = batch.load.running + batch.load.waiting

    def _break(self, error: MeshError) -> None:
        """Lose what was on the link."""
        # A link that cannot be opened at all is told of once: its replica must not look READY for ever.
        is_news = self.is_up or not self._is_told_down
        self.is_up, self._is_told_down = False, True
        lost = list(self._slots.values())
        self._slots.clear()
        self._free.clear()
        self._resting.clear()
        self._outbox.clear()
        self.reported = None
        if is_news:
            # First, so that no lost task is bound to this replica again.
            self._changed(self, error.message)
        for task in lost:
            task.on_lost(error)

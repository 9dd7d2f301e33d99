"""A link's commands on the wire: what one message may hold, and when a slot is given away again."""

from __future__ import annotations

import asyncio

import pytest

from stagemesh.rpc.errors import MeshError
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_head.links import link as link_module
from stagemesh_head.links.link import Link
from stagemesh_head.registry.rows import ReplicaKey

WAIT_S = 5.0


class Wire:
    """A channel with one Execute call whose other end is the test."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[stage_pb.ExecuteRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[stage_pb.ExecuteResponse] = asyncio.Queue()
        self.is_free = asyncio.Event()
        """While it is not set, a write does not return."""
        self.is_free.set()

    def stream_stream(self, *_: object, **__: object) -> object:
        return lambda: self

    def unary_unary(self, *_: object, **__: object) -> object:
        return None

    async def write(self, message: stage_pb.ExecuteRequest) -> None:
        await self.sent.put(message)
        await self.is_free.wait()

    async def read(self) -> stage_pb.ExecuteResponse:
        return await self.answers.get()

    def cancel(self) -> None: ...

    async def close(self) -> None: ...

    async def next_sent(self) -> stage_pb.ExecuteRequest:
        async with asyncio.timeout(WAIT_S):
            return await self.sent.get()


class Told:
    """A task on the link."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def on_tokens(self, token_ids: list[int], text: str) -> None: ...

    def on_event(self, kind: str, event: stage_pb.TaskEvent) -> None:
        self.ended.set()

    def on_lost(self, error: MeshError) -> None: ...


async def test_a_slot_is_not_given_away_while_commands_for_its_last_task_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, is_up = Wire(), asyncio.Event()
    monkeypatch.setattr(link_module, "open_channel", lambda *_, **__: wire)
    link = Link(ReplicaKey("p", "writer", 0), "first", "nowhere:1", "epoch", lambda *_: is_up.set())
    wire.answers.put_nowait(stage_pb.ExecuteResponse(ready=stage_pb.LinkReady()))
    link.start()
    try:
        async with asyncio.timeout(WAIT_S):
            await is_up.wait()
        assert (await wire.next_sent()).HasField("open")
        first = Told()
        slot = link.submit(first, stage_pb.SubmitTask(request_id="first"))
        wire.is_free.clear()  # the writer is busy, so that what follows waits for the next message
        assert (await wire.next_sent()).submits[0].slot == slot
        link.abort(slot, "the client left")
        link.append(stage_pb.AppendInput(slot=slot))
        link.grant(slot, 5)
        # The task ended by itself meanwhile: its replica has not seen any of these.
        finished = stage_pb.TaskEvent(slot=slot, finished=frame_pb.StageFinished())
        wire.answers.put_nowait(stage_pb.ExecuteResponse(events=[finished]))
        async with asyncio.timeout(WAIT_S):
            await first.ended.wait()
        other = link.submit(Told(), stage_pb.SubmitTask(request_id="second"))
        wire.is_free.set()
        message = await wire.next_sent()
        assert [submit.slot for submit in message.submits] == [other]
        # Within a message submissions take effect first: these must not hit the second task.
        for commands in (message.aborts, message.appends, message.credits):
            assert [command.slot for command in commands] == [slot]
        assert other != slot
        assert link.submit(Told(), stage_pb.SubmitTask(request_id="third")) == slot, "and then it is used again"
    finally:
        await link.close("the test is over")

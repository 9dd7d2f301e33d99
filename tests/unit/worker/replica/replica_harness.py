"""A real replica process under a test's control: spawned as a node agent does, spoken to as a head does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from stagemesh.config import Stage
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import open_channel
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import stage_pb2_grpc as stage_grpc
from stagemesh_worker.node.sweeping import sweep
from stagemesh_worker.replica import control

DEADLINE_S = 30.0


class HeadLink:
    """One Execute stream, as a head has it."""

    def __init__(self, endpoint: str, replica: replica_pb.ReplicaRef) -> None:
        self._channel = open_channel(endpoint)
        self._call = stage_grpc.StageServiceStub(self._channel).Execute()
        self._replica = replica
        self.responses: list[stage_pb.ExecuteResponse] = []
        """All that came, in order."""

    async def open(self) -> stage_pb.LinkReady:
        await self.send(open=stage_pb.OpenLink(head_epoch="test", replica=self._replica))
        return (await self._read()).ready

    async def send(self, **fields: Any) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self._call.write(stage_pb.ExecuteRequest(**fields))

    async def submit(self, slot: int = 1, text: str = "a prompt", **fields: Any) -> None:
        await self.send(submits=[submit(slot, text, **fields)])

    async def _read(self) -> stage_pb.ExecuteResponse:
        async with asyncio.timeout(DEADLINE_S):
            response = await self._call.read()
        assert response is not grpc.aio.EOF, f"the stream ended: {await self._call.code()} {await self._call.details()}"
        self.responses.append(response)
        return response

    async def until(self, done: Callable[[HeadLink], bool]) -> None:
        """Read until `done`."""
        while not done(self):
            await self._read()

    async def end_of(self, slot: int) -> stage_pb.TaskEvent:
        """Read until the task's terminal event."""
        await self.until(lambda link: link.ending(slot) is not None)
        event = self.ending(slot)
        assert event is not None
        return event

    async def end_of_stream(self) -> tuple[grpc.StatusCode, str]:
        async with asyncio.timeout(DEADLINE_S):
            try:
                while await self._call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details() or ""
            return await self._call.code(), await self._call.details()

    def events(self, slot: int, kind: str | None = None) -> list[stage_pb.TaskEvent]:
        found = [event for response in self.responses for event in response.events if event.slot == slot]
        return [event for event in found if kind is None or event.WhichOneof("event") == kind]

    def ending(self, slot: int) -> stage_pb.TaskEvent | None:
        kinds = {"finished", "failed", "aborted"}
        return next((event for event in self.events(slot) if event.WhichOneof("event") in kinds), None)

    def token_ids(self, slot: int) -> list[int]:
        ids: list[int] = []
        for response in self.responses:
            at = 0
            for one, count in zip(response.columns.slots, response.columns.counts, strict=True):
                if one == slot:
                    ids.extend(response.columns.token_ids[at : at + count])
                at += count
        return ids

    def text(self, slot: int) -> str:
        pieces = (
            text
            for response in self.responses
            for one, text in zip(response.columns.slots, response.columns.texts, strict=True)
            if one == slot
        )
        return "".join(pieces)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


def submit(slot: int, text: str, llm: dict[str, Any] | None = None, **fields: Any) -> stage_pb.SubmitTask:
    """A task with a text prompt."""
    task = stage_pb.SubmitTask(**{"slot": slot, "request_id": f"request-{slot}", "attempt": 1, "delta": True} | fields)
    if not task.HasField("prompt"):
        task.prompt.text = text
    if llm is not None:
        for name, value in llm.items():
            part = task.params.llm
            getattr(part, name).extend(value) if isinstance(value, list) else setattr(part, name, value)
    return task


def reason_of(event: stage_pb.TaskEvent) -> Reason:
    """Why a task failed."""
    assert event.HasField("failed"), event
    return MeshError.from_status(event.failed).reason


@dataclass
class Replica:
    """A replica process and its agent's end of the control socket."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    reference: replica_pb.ReplicaRef
    messages: list[control.Message] = field(default_factory=list)
    endpoint: str = ""

    async def next(self, deadline_s: float = DEADLINE_S) -> control.Message:
        async with asyncio.timeout(deadline_s):
            line = await self.reader.readline()
        assert line, "the replica closed its control socket"
        self.messages.append(control.decode(line))
        return self.messages[-1]

    async def until(self, kind: type[control.Message], deadline_s: float = DEADLINE_S) -> Any:
        """Read until a message of that kind, and return it."""
        while not isinstance(message := await self.next(deadline_s), kind):
            assert kind is control.Failed or not isinstance(message, control.Failed), message
        return message

    async def ready(self, deadline_s: float = DEADLINE_S) -> Replica:
        self.endpoint = (await self.until(control.Ready, deadline_s)).endpoint
        return self

    async def tell(self, message: control.Message) -> None:
        self.writer.write(control.encode(message))
        await self.writer.drain()

    async def link(self) -> HeadLink:
        link = HeadLink(self.endpoint, self.reference)
        await link.open()
        return link

    async def exit_code(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()


StartReplica = Callable[..., Awaitable[Replica]]


@asynccontextmanager
async def replicas() -> AsyncIterator[StartReplica]:
    """`await start(assign fields, **fields of Stage)` spawns a replica; all are ended afterwards."""
    started: list[Replica] = []

    async def start(assign: dict[str, Any] | None = None, **stage: Any) -> Replica:
        defaults = {"stage_id": 0, "name": "writer", "engine": "synthetic", "stage_type": "llm"}
        settings = Stage.model_validate(defaults | stage)
        ours, theirs = socket.socketpair()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "stagemesh_worker.replica", "--control-fd", str(theirs.fileno()),
            pass_fds=(theirs.fileno(),), start_new_session=True,
        )  # fmt: skip
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=control.MAX_LINE_BYTES)
        reference = replica_pb.ReplicaRef(pipeline="shapes", stage=settings.name, replica_id=0, incarnation="first")
        replica = Replica(process, reader, writer, reference)
        started.append(replica)
        await replica.tell(
            control.Assign(
                "shapes", "revision", settings.model_dump(mode="json"), 0, "first",
                (control.AssignedDevice("cpu:0", (0,)),), host_id="this-host", **(assign or {}),
            )
        )  # fmt: skip
        return replica

    try:
        yield start
    finally:
        for replica in started:
            if replica.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # it ended by itself a moment ago
                    os.killpg(replica.process.pid, signal.SIGKILL)
                await replica.process.wait()
            replica.writer.close()
        sweep()  # what a killed replica leaves is for its agent to remove, which is us

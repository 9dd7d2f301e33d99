"""A replica whose every word is scripted by a test: for faults that no real engine makes on demand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import grpc

from stagemesh.rpc.errors import MeshError
from stagemesh.rpc.options import SERVER_OPTIONS
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import stage_pb2_grpc as stage_rpc
from stagemesh.v1 import tensor_pb2 as tensor_pb

WAIT_S = 10.0
"""Longest wait of a test for something that must happen."""


class ScriptedTask:
    """One submitted task; the test plays the engine."""

    def __init__(self, stage: ScriptedStage, submit: stage_pb.SubmitTask) -> None:
        self.stage = stage
        self.submit = submit
        self.appends: asyncio.Queue[stage_pb.AppendInput] = asyncio.Queue()
        self.grants: asyncio.Queue[int] = asyncio.Queue()
        self.abort_seen = asyncio.Event()
        self.is_over = False

    def _event(self, **content: object) -> None:
        event = stage_pb.TaskEvent(slot=self.submit.slot, **content)  # type: ignore[arg-type]
        self.stage.send(stage_pb.ExecuteResponse(events=[event]))

    def _last(self, **content: object) -> None:
        self.is_over = True
        self.stage.tasks.pop(self.submit.slot, None)
        self._event(**content)

    def started(self) -> None:
        self._event(started=stage_pb.TaskStarted())

    def tokens(self, token_ids: list[int], text: str) -> None:
        columns = stage_pb.TokenColumns(
            slots=[self.submit.slot], counts=[len(token_ids)], token_ids=token_ids, texts=[text]
        )
        self.stage.send(stage_pb.ExecuteResponse(columns=columns))

    def text(self, **delta: object) -> None:
        self._event(text=frame_pb.TextDelta(**delta))  # type: ignore[arg-type]

    def progress(self, step: int, total: int, preview: bytes = b"") -> None:
        shown = frame_pb.MediaOutput(mime_type="image/jpeg", data=preview) if preview else None
        self._event(progress=frame_pb.Progress(step=step, total_steps=total, preview=shown))

    def media(self, data: bytes, index: int = 0) -> None:
        self._event(
            media=frame_pb.MediaOutput(modality=frame_pb.MODALITY_IMAGE, mime_type="image/png", data=data, index=index)
        )

    def tensor(self, name: str, reference: tensor_pb.TensorRef) -> None:
        value = tensor_pb.TensorValue(ref=reference)
        self._event(tensor=frame_pb.TensorOutput(name=name, value=value))

    def took(self, chunks: int) -> None:
        self._event(input_taken=stage_pb.InputTaken(chunks=chunks))

    def finish(self, reason: int = frame_pb.FINISH_REASON_STOP, **usage: int) -> None:
        self._last(finished=frame_pb.StageFinished(finish_reason=reason, usage=frame_pb.Usage(**usage)))

    def fail(self, error: MeshError) -> None:
        self._last(failed=error.to_status())

    def confirm_abort(self) -> None:
        self._last(aborted=stage_pb.TaskAborted())

    async def aborted(self) -> None:
        """Wait until the head asks for the task's end."""
        async with asyncio.timeout(WAIT_S):
            await self.abort_seen.wait()


class ScriptedStage(stage_rpc.StageServiceServicer):
    """One replica on a port of its own."""

    _incarnations = itertools.count(1)

    def __init__(self) -> None:
        self.endpoint = ""
        self.incarnation = f"scripted-{next(self._incarnations)}"
        self.tasks: dict[int, ScriptedTask] = {}
        self.submitted: list[stage_pb.SubmitTask] = []
        self.links = 0
        self.confirms_aborts = True
        self.call_takes_s = 0.0
        self._arrivals: asyncio.Queue[ScriptedTask] = asyncio.Queue()
        self._outgoing: asyncio.Queue[stage_pb.ExecuteResponse | None] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None

    async def start(self, endpoint: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server(options=[*SERVER_OPTIONS, ("grpc.so_reuseport", 0)])
        stage_rpc.add_StageServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(endpoint)
        self.endpoint = f"127.0.0.1:{port}"
        await self._server.start()

    async def crash(self) -> None:
        """End as a killed process does: the connection breaks, nothing more is said."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    def break_link(self) -> None:
        """End the stream, but go on serving."""
        self._outgoing.put_nowait(None)

    def send(self, response: stage_pb.ExecuteResponse) -> None:
        self._outgoing.put_nowait(response)

    async def next_task(self) -> ScriptedTask:
        """The next task that the head submits."""
        async with asyncio.timeout(WAIT_S):
            return await self._arrivals.get()

    @property
    def has_arrivals(self) -> bool:
        """Whether a task arrived that the test did not take yet."""
        return not self._arrivals.empty()

    async def Execute(
        self, request_iterator: AsyncIterator[stage_pb.ExecuteRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[stage_pb.ExecuteResponse]:
        opening = await anext(request_iterator)
        if opening.open.replica.incarnation != self.incarnation:
            await MeshError.from_status(_stale()).abort(context)
        self._outgoing = asyncio.Queue()
        self.links += 1
        yield stage_pb.ExecuteResponse(ready=stage_pb.LinkReady(replica=opening.open.replica))
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while (response := await self._outgoing.get()) is not None:
                yield response
        finally:
            reader.cancel()
            self.tasks.clear()

    async def _read(self, requests: AsyncIterator[stage_pb.ExecuteRequest]) -> None:
        async for request in requests:
            for submit in request.submits:
                task = self.tasks[submit.slot] = ScriptedTask(self, submit)
                self.submitted.append(submit)
                self._arrivals.put_nowait(task)
            for append in request.appends:
                self.tasks[append.slot].appends.put_nowait(append)
            for abort in request.aborts:
                if (task := self.tasks.get(abort.slot)) is not None:
                    task.abort_seen.set()
                    if self.confirms_aborts:
                        task.confirm_abort()
            for credit in request.credits:
                if (task := self.tasks.get(credit.slot)) is not None:
                    task.grants.put_nowait(credit.units)

    async def Call(self, request: stage_pb.CallRequest, context: grpc.aio.ServicerContext) -> stage_pb.CallResponse:
        await asyncio.sleep(self.call_takes_s)
        response = stage_pb.CallResponse()
        response.result.string_value = f"{request.method} on {self.incarnation}"
        return response


def _stale():
    from stagemesh.rpc.errors import Reason

    return MeshError(Reason.STALE_INCARNATION).to_status()

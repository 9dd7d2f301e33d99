"""One task from its submission to its one terminal event. No exception of a task leaves this file."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.telemetry.tracing import Tracer
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_worker.adapters import AdapterRunner, StageInput, TaskAdapter
from stagemesh_worker.engines.base import Engine, EngineInput, EngineTask
from stagemesh_worker.replica.inputs import FurtherInput, Resolver, read_prompt, read_upstream
from stagemesh_worker.replica.sink import SlotSink
from stagemesh_worker.replica.tracing import TaskTrace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What all tasks of a replica share."""

    engine: Engine
    adapters: AdapterRunner
    resolver: Resolver
    tracer: Tracer | None = None
    """Makes the spans of tasks; None: nobody wants any."""

    def trace(self, submit: stage_pb.SubmitTask) -> TaskTrace | None:
        """The spans of a task, if they are wanted and its request was sampled."""
        if self.tracer is None:
            return None
        stage = self.engine.stage
        return TaskTrace(self.tracer, submit, stage.name, is_llm=stage.stage_type == "llm")


class RunningTask:
    """A task in a slot, and the asyncio task that runs it."""

    def __init__(self, submit: stage_pb.SubmitTask, sink: SlotSink, context: TaskContext, is_probe: bool) -> None:
        self.submit = submit
        self.sink = sink
        self._context = context
        self._is_probe = is_probe
        self._trace = None if is_probe else context.trace(submit)
        self._further = FurtherInput(sink.input_taken) if submit.more_input else None
        self._ending: MeshError | None = None
        self.work = asyncio.create_task(self._visit(), name=f"task {submit.request_id}")
        self.work.add_done_callback(self._conclude)

    def append(self, chunk: stage_pb.AppendInput) -> None:
        """Further input; a chunk for a task that takes none fails that task."""
        try:
            if self._further is None:
                raise MeshError(Reason.INVALID_REQUEST, "input for a task that was submitted as complete")
            self._further.append(chunk)
        except MeshError as error:
            self.fail(error)

    def abort(self) -> None:
        """Stop it; its Aborted event follows once the engine let go."""
        self.work.cancel()

    def fail(self, error: MeshError) -> None:
        """Stop it for a reason of this replica's; its Failed event follows once the engine let go."""
        if self._ending is None:
            self._ending = error
        self.work.cancel()

    def _conclude(self, work: asyncio.Task[None]) -> None:
        """Say how it ended, unless the engine said so itself. Also right for a task that never began to run."""
        try:
            self._say_end(work)
        finally:
            _let_go(work)

    def _say_end(self, work: asyncio.Task[None]) -> None:
        name = self.submit.request_id
        if self.sink.ended:
            self._end_trace(None)
            if not work.cancelled() and work.exception() is not None:
                log.error("request %s: error after its end: %s", name, work.exception(), extra={"request_id": name})
            return
        if work.cancelled():
            self._end_trace(self._ending, aborted=self._ending is None)
            if self._ending is not None:
                self.sink.failed(self._ending)
            else:
                self.sink.aborted()
            return
        error = work.exception()
        if error is None:
            error = MeshError(Reason.STAGE_FAILED, "the engine returned without an end")
        elif not isinstance(error, MeshError):
            log.error("request %s: the engine raised", name, exc_info=error, extra={"request_id": name})
            error = MeshError(Reason.STAGE_FAILED, f"{type(error).__name__}: {error}")
        error.metadata.setdefault("stage", self._context.engine.stage.name)
        self._end_trace(error)
        self.sink.failed(error)

    def _end_trace(self, error: MeshError | None, *, aborted: bool = False) -> None:
        if self._trace is not None:
            self._trace.end(self.sink, error, aborted=aborted)

    async def _visit(self) -> None:
        """The task's work within its deadline, and until a slow consumer has taken all of it."""
        if not self.submit.HasField("time_left"):
            await self._execute()
            await self.sink.drained()
            return
        left = self.submit.time_left.ToNanoseconds() / 1e9
        try:
            async with asyncio.timeout(left) as scope:
                await self._execute()
                await self.sink.drained()
        except TimeoutError:
            if not scope.expired():
                raise
            raise MeshError(Reason.REQUEST_TIMEOUT, f"the stage was not done within {left:.3f} s") from None

    async def _execute(self) -> None:
        submit, began = self.submit, monotonic()  # the event loop's own clock counts whole milliseconds
        request = await read_prompt(submit.prompt, self._context.resolver)
        inputs = [await self._bring(item, is_first=True) for item in submit.inputs]
        if inputs:
            self.sink.transfer_s = monotonic() - began
        adapter = self._context.adapters.for_task()
        further = self._further_inputs(adapter, request) if self._further is not None else None
        if self._is_probe:
            first: EngineInput | None = self._context.engine.probe_input(request)
        else:
            first = await self._first(adapter, request, inputs, further)
        if first is None:
            # The stages before made nothing, so there is nothing to make: an empty output is the right answer.
            self.sink.started()
            self.sink.finish(frame_pb.StageFinished(finish_reason=frame_pb.FINISH_REASON_COMPLETE))
            return
        if self._trace is not None:
            self._trace.engine_begins()
        await self._context.engine.run(EngineTask(submit, first, further), self.sink)

    async def _bring(self, item: stage_pb.UpstreamOutput, *, is_first: bool = False) -> StageInput:
        """An output of a stage before, wherever its bytes are; `is_first`: it came with the task."""
        began = monotonic()
        output = await read_upstream(item, self._context.resolver)
        self.sink.transfers.add(output, monotonic() - began)
        if is_first and self._trace is not None:
            self._trace.brought(output.stage, output.size_bytes, began)
        return output

    async def _first(
        self,
        adapter: TaskAdapter,
        request: EngineInput,
        inputs: Sequence[StageInput],
        further: AsyncIterator[EngineInput] | None,
    ) -> EngineInput | None:
        """The input to start with. On a stream edge that brought nothing yet, the first chunk that does."""
        if further is None or not self._context.engine.stage.inputs:
            return await adapter(request, inputs)
        if not all(item.is_empty for item in inputs):
            made = await adapter(request, inputs)
            if made is not None:
                return made
            self.sink.started()  # that chunk was taken: its producer may go on
        return await anext(further, None)

    async def _further_inputs(self, adapter: TaskAdapter, request: EngineInput) -> AsyncIterator[EngineInput]:
        """Further chunks, each through the adapter; chunks that hold nothing, or not enough, are passed over."""
        assert self._further is not None
        async for chunk in self._further.chunks():
            if chunk.HasField("chunk"):
                output = await self._bring(chunk.chunk)
                passed_over = output.is_empty and not (output.finished and adapter.remembers)
                made = None if passed_over else await adapter(request, [output])
            elif chunk.HasField("prompt"):
                made = await adapter(await read_prompt(chunk.prompt, self._context.resolver), [])
            else:
                made = None
            if made is not None and chunk.HasField("params"):
                made = replace(made, extra={**made.extra, "params": chunk.params})
            if made is not None:
                yield made


def _let_go(work: asyncio.Task[None]) -> None:
    """Clear the frames of work that broke off: they hold its inputs, and its timeout holds them in a circle.

    Else mapped tensors would take memory and descriptors until Python looks for circles.
    """
    try:
        error = work.exception()
    except asyncio.CancelledError as cancelled:
        error = cancelled
    if error is not None:
        traceback.clear_frames(error.__traceback__)

"""A request whose input arrives in chunks: each continues the context and generates up to its own budget.

vLLM's rule: the context of a chunk holds the outputs before it, without the last sampled token of each. A chunk is
taken when the one before has been answered, so that a fast sender waits at the head and not inside the engine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

from vllm.engine.protocol import StreamingInput
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh_worker.engines.base import EngineInput, EngineTask, TaskSink
from stagemesh_worker.engines.vllm.assembly import TextAssembler
from stagemesh_worker.engines.vllm.ending import finish_reason
from stagemesh_worker.engines.vllm.prompts import PromptBuilder
from stagemesh_worker.engines.vllm.sampling import sampling_params

_numbers = itertools.count(1)


class StreamingGeneration:
    """A request with further input."""

    def __init__(
        self,
        task: EngineTask,
        sink: TaskSink,
        builder: PromptBuilder,
        lora: LoRARequest | None,
    ) -> None:
        """Raises MeshError for what streaming input cannot have."""
        self._task = task
        self._sink = sink
        self._builder = builder
        self._lora = lora
        typed = task.submit.params.llm
        self._params = self._checked(typed)
        if task.submit.HasField("reasoning_ended"):
            raise MeshError(Reason.UNSUPPORTED, "reasoning_ended: vLLM takes none with streaming input")
        if task.submit.resume_token_ids:
            raise MeshError(Reason.UNSUPPORTED, "a request with streaming input cannot be resumed from its tokens")
        self._answered = asyncio.Event()
        self._finished = frame_pb.StageFinished(finish_reason=frame_pb.FINISH_REASON_LENGTH)

    async def run(self, llm: Any) -> None:
        """Generate until the input has ended and its last chunk is answered. Raises MeshError."""
        submit, typed = self._task.submit, self._task.submit.params.llm
        first = await self._builder.build(self._task.input, submit)
        self._finished.usage.prompt_tokens = first.length
        skip = typed.skip_special_tokens if typed.HasField("skip_special_tokens") else True
        spaces = typed.spaces_between_special_tokens if typed.HasField("spaces_between_special_tokens") else True
        assembler = TextAssembler(
            self._builder.decoder(first.token_ids, skip, spaces), include_stop=typed.include_stop_str_in_output
        )
        stream = llm.generate(
            self._chunks(first.value),
            self._params,
            f"{submit.request_id}-{submit.attempt}-stream-{next(_numbers)}",
            lora_request=self._lora,
            priority=submit.priority,
            trace_headers=self._task.trace_headers,
            data_parallel_rank=submit.data_parallel_rank if submit.HasField("data_parallel_rank") else None,
        )
        began = False
        try:
            async for output in stream:
                if not began:
                    began = True
                    self._sink.started()
                for completion in output.outputs:
                    ended = completion.finish_reason is not None
                    ids = completion.token_ids
                    piece = assembler.push(ids, completion.finish_reason == "stop" and bool(ids))
                    if piece.token_ids or piece.text:
                        self._sink.tokens(piece.token_ids, piece.text)
                    if ended:
                        self._finished.finish_reason = finish_reason(completion)  # type: ignore[assignment]
                        self._answered.set()
                if not self._sink.writable:
                    await self._sink.ready()
        finally:
            await stream.aclose()
        self._finished.usage.completion_tokens = assembler.count
        self._sink.finish(self._finished)

    async def _chunks(self, first: Any) -> AsyncIterator[StreamingInput]:
        yield StreamingInput(prompt=first, sampling_params=self._params)
        assert self._task.more_input is not None
        while True:
            # The event is set again by the answer to the chunk that is yielded next.
            await self._answered.wait()
            self._answered.clear()
            given = await anext(self._task.more_input, None)
            if given is None:
                return
            built = await self._builder.chunk(given, self._task.submit.cache_salt or None)
            self._finished.usage.prompt_tokens += built.length
            yield StreamingInput(prompt=built.value, sampling_params=self._params_of(given))

    def _params_of(self, given: EngineInput) -> SamplingParams:
        own = given.extra.get("params")
        return self._params if own is None else self._checked(own.llm)

    def _checked(self, typed: sampling_pb.LlmSamplingParams) -> SamplingParams:
        """Parameters of a chunk. Raises MeshError for what streaming input cannot have."""
        if typed.stop:
            raise invalid("stop", list(typed.stop), "streaming input takes stop_token_ids, not stop texts")
        if typed.HasField("n") and typed.n != 1:
            raise invalid("n", typed.n, "streaming input makes 1 completion")
        for field in ("logprobs", "prompt_logprobs"):
            if typed.HasField(field):  # type: ignore[arg-type]
                raise invalid(field, getattr(typed, field), "streaming input has no log-probabilities")
        return sampling_params(typed, self._task.submit)

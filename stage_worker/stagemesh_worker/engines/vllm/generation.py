"""One task on the engine: its stream of tokens, as text, into the sink."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh_worker.engines.base import EngineTask, TaskSink
from stagemesh_worker.engines.vllm.assembly import Piece, TextAssembler
from stagemesh_worker.engines.vllm.ending import ended_before, finish_reason
from stagemesh_worker.engines.vllm.hand_off import KV_TRANSFER, check_seal, seal
from stagemesh_worker.engines.vllm.prompts import BuiltPrompt, PromptBuilder
from stagemesh_worker.engines.vllm.sampling import sampling_params

_numbers = itertools.count(1)


class Generation:
    """A request without further input."""

    def __init__(
        self,
        task: EngineTask,
        sink: TaskSink,
        builder: PromptBuilder,
        default_stop_ids: frozenset[int],
        lora: LoRARequest | None,
    ) -> None:
        """`default_stop_ids` are the model's own end-of-sequence ids."""
        self._task = task
        self._sink = sink
        self._builder = builder
        self._default_stop_ids = default_stop_ids
        self._lora = lora
        self._typed: sampling_pb.LlmSamplingParams = task.submit.params.llm
        self._params: SamplingParams = sampling_params(self._typed, task.submit)
        self._assemblers: list[TextAssembler] = []
        self._finished = frame_pb.StageFinished()
        self._reasons: dict[int, int] = {}
        # Whole output of each completion, for requests that want no deltas.
        self._collected: dict[int, tuple[list[int], list[str]]] = {}
        # Embeddings cannot be followed by tokens: the output is made anew and what was delivered is passed over.
        self._pass_over: list[int] = []

    async def run(self, llm: Any) -> None:
        """Generate to the end. Raises MeshError, and whatever the engine does."""
        submit, typed = self._task.submit, self._typed
        truncate = typed.truncate_prompt_tokens if typed.HasField("truncate_prompt_tokens") else None
        prompt = await self._builder.build(self._task.input, submit, truncate)
        self._open_assemblers(prompt)
        self._finished.usage.prompt_tokens = prompt.length
        if submit.resume_token_ids and self._resume(prompt):
            return
        await self._take_over(llm, prompt)
        before = self._assemblers[0].count
        try:
            await self._consume(self._stream(llm, prompt, self._params), prompt)
        except MeshError as error:
            # vLLM's frontend counts media as sent once it has processed them, also when the request ended before they
            # went to the core. The next request with them fails, and with that the frontend learns of it.
            made = sum(assembler.count for assembler in self._assemblers) - before
            if error.reason is not Reason.STAGE_FAILED or made or not self._task.input.media:
                raise
            await self._consume(self._stream(llm, prompt, self._params), prompt)
        self._end()

    def _stream(self, llm: Any, prompt: BuiltPrompt, params: SamplingParams) -> AsyncIterator[Any]:
        submit = self._task.submit
        outputs: AsyncIterator[Any] = llm.generate(
            prompt.value,
            params,
            f"{submit.request_id}-{submit.attempt}-{next(_numbers)}",
            lora_request=self._lora,
            priority=submit.priority,
            data_parallel_rank=submit.data_parallel_rank if submit.HasField("data_parallel_rank") else None,
            trace_headers=self._task.trace_headers,
            reasoning_ended=submit.reasoning_ended if submit.HasField("reasoning_ended") else None,
        )
        return outputs

    async def _take_over(self, llm: Any, prompt: BuiltPrompt) -> None:
        """Check what a prefill engine handed over. It serves one request of the engine, and n > 1 are n requests."""
        transfer = (self._params.extra_args or {}).get(KV_TRANSFER)
        if transfer is None:
            return
        check_seal(transfer, prompt.token_ids)
        if self._params.n > 1:
            # One before them brings the blocks into the prefix cache, where all of them find what is whole.
            first = SamplingParams(max_tokens=1, detokenize=False, extra_args={KV_TRANSFER: transfer})
            del self._params.extra_args[KV_TRANSFER]
            async for _ in self._stream(llm, prompt, first):
                pass

    def _open_assemblers(self, prompt: BuiltPrompt) -> None:
        typed = self._typed
        skip = typed.skip_special_tokens if typed.HasField("skip_special_tokens") else True
        spaces = typed.spaces_between_special_tokens if typed.HasField("spaces_between_special_tokens") else True
        for _ in range(self._params.n):
            self._assemblers.append(
                TextAssembler(
                    self._builder.decoder(prompt.token_ids, skip, spaces),
                    stop=typed.stop,
                    include_stop=typed.include_stop_str_in_output,
                    min_tokens=typed.min_tokens,
                )
            )

    def _resume(self, prompt: BuiltPrompt) -> bool:
        """Take in the tokens made before; True when they were the whole output already."""
        submit, typed = self._task.submit, self._typed
        resumed = list(submit.resume_token_ids)
        stop_ids = set(typed.stop_token_ids) | (set() if typed.ignore_eos else self._default_stop_ids)
        budget = typed.max_tokens if typed.HasField("max_tokens") else None
        room = self._builder.max_model_len - prompt.length
        budget = room if budget is None else min(budget, room)
        reason = ended_before(resumed, budget, typed.min_tokens, stop_ids)
        piece = self._assemblers[0].replay(resumed, submit.resume_text_chars, reason == frame_pb.FINISH_REASON_STOP)
        if piece.stop is not None:
            reason = frame_pb.FINISH_REASON_STOP
            self._finished.stop_reason = piece.stop
        text = piece.text + (self._assemblers[0].flush() if reason is not None else "")
        if text:
            self._deliver(0, Piece([], text))
        if reason is not None:
            self._sink.started(0.0)
            self._reasons[0] = reason
            self._end()
            return True
        if not prompt.token_ids:
            self._make_anew(resumed)
        return False

    def _make_anew(self, resumed: list[int]) -> None:
        """Generate from the start, and pass over what was delivered before."""
        if self._params.temperature > 0:
            raise MeshError(Reason.UNSUPPORTED, "a sampled request with prompt embeddings cannot be resumed")
        self._pass_over = resumed
        if self._params.max_tokens is not None:
            self._params.max_tokens = self._typed.max_tokens
        self._params.min_tokens = self._typed.min_tokens

    async def _consume(self, stream: AsyncIterator[Any], prompt: BuiltPrompt) -> None:
        sink, first = self._sink, True
        try:
            async for output in stream:
                if first:
                    first = False
                    self._began(output)
                for completion in output.outputs:
                    self._take(completion)
                if output.finished:
                    transfer = getattr(output, KV_TRANSFER, None)
                    if transfer:
                        self._finished.extra.update({KV_TRANSFER: seal(transfer, prompt.token_ids)})
                if not output.finished and len(self._reasons) == len(self._assemblers):
                    break  # a stop text, which the engine does not know of
                if not sink.writable:
                    await sink.ready()
        finally:
            # Ends the request inside the engine when it is left before its end: a stop text, an abort.
            await stream.aclose()  # type: ignore[attr-defined]

    def _began(self, output: Any) -> None:
        stats, waited = output.metrics, 0.0
        if stats is not None and stats.scheduled_ts and stats.queued_ts:
            waited = max(0.0, stats.scheduled_ts - stats.queued_ts)
        self._sink.started(waited)
        self._finished.usage.cached_tokens = max(0, output.num_cached_tokens or 0)
        if not self._finished.usage.prompt_tokens or self._task.input.media:
            self._finished.usage.prompt_tokens = len(output.prompt_token_ids or ())
        if output.prompt_logprobs:
            self._finished.extra.update({"prompt_logprobs": [_as_json(one) for one in output.prompt_logprobs]})

    def _take(self, completion: Any) -> None:
        index = completion.index
        if index in self._reasons:
            return
        ids, logprobs = list(completion.token_ids), completion.logprobs
        if self._pass_over and ids:
            again = min(len(self._pass_over), len(ids))
            if ids[:again] != self._pass_over[:again]:
                raise MeshError(Reason.STAGE_LOST, "the output made anew differs from what was delivered")
            del self._pass_over[:again]
            ids, logprobs = ids[again:], logprobs and logprobs[again:]
        ended = completion.finish_reason is not None
        by_token = completion.finish_reason == "stop" and bool(ids)
        assembler = self._assemblers[index]
        piece = assembler.push(ids, by_token)
        if piece.stop is not None:
            self._reasons[index] = frame_pb.FINISH_REASON_STOP
            if index == 0:
                self._finished.stop_reason = piece.stop
        elif ended:
            self._reasons[index] = finish_reason(completion)
            if index == 0 and completion.stop_reason is not None:
                self._finished.stop_reason = str(completion.stop_reason)
            piece = Piece(piece.token_ids, piece.text + assembler.flush())
        if piece.token_ids or piece.text:
            self._deliver(index, piece, logprobs)

    def _deliver(self, index: int, piece: Piece, logprobs: Any = None) -> None:
        if index == 0 and logprobs is None and len(self._assemblers) == 1:
            if self._task.submit.delta:
                self._sink.tokens(piece.token_ids, piece.text)
            else:
                ids, texts = self._collected.setdefault(0, ([], []))
                ids.extend(piece.token_ids)
                texts.append(piece.text)
            return
        delta = frame_pb.TextDelta(index=index, text=piece.text, token_ids=piece.token_ids)
        for token_id, position in zip(piece.token_ids, logprobs or (), strict=False):
            delta.logprobs.append(position[token_id].logprob)
            best = sorted(position.items(), key=lambda item: item[1].rank or 0)[: self._typed.logprobs]
            delta.top_logprobs.add(
                token_ids=[number for number, _ in best], logprobs=[entry.logprob for _, entry in best]
            )
        self._sink.text(delta)

    def _end(self) -> None:
        for ids, texts in self._collected.values():
            self._sink.tokens(ids, "".join(texts))
        finished = self._finished
        finished.finish_reason = self._reasons.get(0, frame_pb.FINISH_REASON_STOP)  # type: ignore[assignment]
        finished.usage.completion_tokens = sum(assembler.count for assembler in self._assemblers)
        if len(self._assemblers) > 1:
            names = [frame_pb.FinishReason.Name(self._reasons[index]) for index in sorted(self._reasons)]  # type: ignore[arg-type]
            finished.extra.update({"finish_reasons": names})
        self._sink.finish(finished)


def _as_json(position: Any) -> Any:
    """Log-probabilities of one prompt token; the first has none."""
    return None if position is None else {str(number): entry.logprob for number, entry in position.items()}

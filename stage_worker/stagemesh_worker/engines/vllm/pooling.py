"""A request to a model that runs as a pooler: its prompt becomes hidden states or an embedding."""

from __future__ import annotations

import itertools
from typing import Any

from google.protobuf import json_format
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams

from stagemesh.config import suggest
from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.wire import whole_numbers
from stagemesh_worker.engines.base import EngineTask, TaskSink
from stagemesh_worker.engines.vllm.prompts import PromptBuilder

OUTPUT_NAMES = {"token_embed": "hidden_states", "embed": "embedding", "classify": "classes"}
"""Pooling task -> name of the tensor it makes: [tokens, hidden], [hidden], [classes]; the first is the default."""
_EXTRA = ("pooling_task", "use_activation", "dimensions")

_numbers = itertools.count(1)


class Pooling:
    """One request. `extra` may choose the `pooling_task`, `use_activation` and `dimensions`."""

    def __init__(self, task: EngineTask, sink: TaskSink, builder: PromptBuilder, lora: LoRARequest | None) -> None:
        if task.more_input is not None:
            raise MeshError(Reason.UNSUPPORTED, "a pooling model takes its input whole")
        self._task = task
        self._sink = sink
        self._builder = builder
        self._lora = lora

    async def run(self, llm: Any) -> None:
        """Run it. Raises MeshError, and whatever the engine does."""
        submit, typed = self._task.submit, self._task.submit.params.llm
        params = self._params(await llm.get_supported_tasks())
        truncate = typed.truncate_prompt_tokens if typed.HasField("truncate_prompt_tokens") else None
        prompt = await self._builder.build(self._task.input, submit, truncate)
        output = await self._output(llm, prompt.value, params)
        if output.error is not None and output.error.retryable:
            # The engine had not got the media that its frontend counts as sent; now the frontend knows.
            output = await self._output(llm, prompt.value, params)
        if output.error is not None:
            raise MeshError(Reason.STAGE_FAILED, output.error.message)
        self._sink.started()
        await self._sink.ready()
        self._sink.tensor(OUTPUT_NAMES[params.task], output.outputs.data.float().numpy())
        finished = frame_pb.StageFinished(finish_reason=frame_pb.FINISH_REASON_COMPLETE)
        finished.usage.prompt_tokens = len(output.prompt_token_ids) or prompt.length
        finished.usage.cached_tokens = max(0, output.num_cached_tokens or 0)
        self._sink.finish(finished)

    async def _output(self, llm: Any, prompt: Any, params: PoolingParams) -> Any:
        """The one finished output. Raises whatever the engine does."""
        submit = self._task.submit
        stream = llm.encode(
            prompt,
            params,
            f"{submit.request_id}-{submit.attempt}-pool-{next(_numbers)}",
            lora_request=self._lora,
            priority=submit.priority,
            trace_headers=self._task.trace_headers,
            reasoning_ended=submit.reasoning_ended if submit.HasField("reasoning_ended") else None,
        )
        try:
            async for output in stream:
                if output.finished:
                    return output
        finally:
            await stream.aclose()
        raise MeshError(Reason.STAGE_FAILED, "the engine returned without an end")

    def _params(self, supported: tuple[str, ...]) -> PoolingParams:
        extra = whole_numbers(json_format.MessageToDict(self._task.submit.params.llm.extra))
        for name in extra:
            if name not in _EXTRA:
                raise invalid(f"extra.{name}", extra[name], suggest(name, _EXTRA) or f"want one of {', '.join(_EXTRA)}")
        possible = [name for name in OUTPUT_NAMES if name in supported]
        task = extra.pop("pooling_task", possible[0] if possible else None)
        if task not in possible:
            raise invalid("extra.pooling_task", task, f"the model can do {', '.join(possible) or 'none of ours'}")
        if task == "token_embed":
            extra.setdefault("use_activation", False)  # the bare hidden states, as another model's prompt wants them
        return PoolingParams(task=task, **extra)

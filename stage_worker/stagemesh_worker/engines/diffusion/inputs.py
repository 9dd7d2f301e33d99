"""The whole input of a task: a diffusion model starts once the text before it is complete."""

from __future__ import annotations

from dataclasses import replace

from stagemesh_worker.engines.base import EngineInput, EngineTask


async def whole_input(task: EngineTask) -> EngineInput:
    """The task's input with all further chunks joined to it, waiting for them.

    Texts are joined; of everything else the last word counts.
    """
    whole = task.input
    if task.more_input is None:
        return whole
    async for chunk in task.more_input:
        whole = replace(
            whole,
            text=(whole.text or "") + chunk.text if chunk.text is not None else whole.text,
            messages=chunk.messages or whole.messages,
            embeds=chunk.embeds if chunk.embeds is not None else whole.embeds,
            negative_text=chunk.negative_text or whole.negative_text,
            media=chunk.media or whole.media,
            tensors={**whole.tensors, **chunk.tensors},
            extra={**whole.extra, **chunk.extra},
        )
    return whole

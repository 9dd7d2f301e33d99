"""The companion of a wish: the writer also writes what the painter shall keep away from (classifier-free guidance)."""

from __future__ import annotations

from typing import Any

from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb

AVOID = "avoid: "
"""The writer learnt to answer such a wish with what to keep away from; see training/train_writer.py."""


def negative(prompt: prompt_pb.Prompt, params: sampling_pb.SamplingParams) -> list[dict[str, Any]]:
    """One companion of role "negative"; none for a request that says itself what to avoid."""
    wish = prompt.chat.messages[-1].content if prompt.HasField("chat") else prompt.text
    if not wish or prompt.negative_text:
        return []
    return [{"suffix": "-negative", "role": "negative", "prompt": AVOID + wish}]

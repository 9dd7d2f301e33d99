"""The companion of a wish: the writer also writes what the painter shall keep away from (classifier-free guidance)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AVOID = "avoid: "
"""What the writer learnt to answer with such a caption; see training/train_writer.py."""


def negative(prompt: Mapping[str, Any], params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One companion of role "negative", for a wish in words that does not say itself what to avoid."""
    wish = prompt.get("text")
    if not wish and prompt.get("messages"):
        wish = prompt["messages"][-1]["content"]
    if not wish or prompt.get("negative_text"):
        return []
    return [{"suffix": "-negative", "role": "negative", "prompt": AVOID + wish}]

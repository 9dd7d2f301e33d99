"""Functions that pipelines of the companion tests name as `prompt_expand`."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb

release = threading.Event()
"""Set by a test to let `blocks` return."""


def negative(prompt: prompt_pb.Prompt, params: sampling_pb.SamplingParams) -> list[dict[str, Any]]:
    budget = params.llm.max_tokens or 10
    return [
        {
            "suffix": "-negative",
            "role": "negative",
            "prompt": f"not {prompt.text}",
            "overrides": {"max_tokens": budget * 2, "temperature": 0.0},
        }
    ]


def two(prompt: prompt_pb.Prompt, params: sampling_pb.SamplingParams) -> list[dict[str, Any]]:
    other = [{"role": "user", "content": f"instead of {prompt.text}"}]
    return [*negative(prompt, params), {"suffix": ".other", "role": "other", "prompt": other}]


def of_its_kind(prompt: prompt_pb.Prompt, params: sampling_pb.SamplingParams) -> Any:
    """What the prompt asks for: a mistake of some kind, or none."""
    good = negative(prompt, params)[0]
    match prompt.text:
        case "none":
            return []
        case "raises":
            raise LookupError("no words for it")
        case "time limit":
            raise TimeoutError("of its own")
        case "cancellation":
            raise asyncio.CancelledError("of its own")
        case "end of the process":
            sys.exit(3)
        case "strange words":
            raise OSError("no file a\udcff.txt")
        case "strange role":
            return [{**good, "role": "a\udcff"}]
        case "nothing":
            return None
        case "no mapping":
            return ["not this"]
        case "many":
            return [{**good, "suffix": f"-{number}"} for number in range(9)]
        case "twice":
            return [good, good]
        case "suffix":
            return [{**good, "suffix": "a/b"}]
        case "role":
            return [{**good, "role": ""}]
        case "prompt":
            return [good, {**good, "suffix": "-b", "prompt": ""}]
        case "no prompt":
            return [{"suffix": "-a", "role": "a"}]
        case "strange prompt":
            return [{**good, "prompt": object()}]
        case "override":
            return [{**good, "overrides": {"max_tokens": 0}}]
        case "unknown override":
            return [{**good, "overrides": {"max_tokens": "many"}}]
        case "unknown":
            return [{**good, "colour": "red"}]
    prompt.text = "changed by the function, which must not matter"
    return [good]


def blocks(prompt: prompt_pb.Prompt, params: sampling_pb.SamplingParams) -> list[dict[str, Any]]:
    if prompt.text == "block":
        release.wait(10)
    return negative(prompt, params)


def when_asked(prompt: prompt_pb.Prompt, params: sampling_pb.SamplingParams) -> list[dict[str, Any]]:
    return negative(prompt, params) if prompt.text == "with companion" else []

"""Makes the companions of a prompt: runs the operator's `prompt_expand` function, and checks what it returns."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stagemesh.config import Stage
from stagemesh.config.dotted import call_foreign, import_dotted
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh_head.orchestration.envelope import check_prompt
from stagemesh_head.orchestration.params import from_mapping, merge
from stagemesh_head.orchestration.plan import Companion

EXPAND_TIMEOUT_S = 10.0
"""Longest time for one prompt. It is a look at a text; nothing of the request has begun meanwhile."""
MAX_COMPANIONS = 8
SUFFIX = re.compile(r"[A-Za-z0-9._:-]{1,32}")
MAX_ROLE_CHARS = 64
_THREADS = 4
_REQUIRED, _OPTIONAL = {"suffix", "role", "prompt"}, {"overrides"}


class Expander:
    """The expansion function of one stage."""

    def __init__(self, stage: Stage, timeout_s: float = EXPAND_TIMEOUT_S) -> None:
        """Import the function. Raises ValueError that names the stage when it cannot be had."""
        self._stage = stage
        self._dotted = str(stage.prompt_expand)
        self._timeout_s = timeout_s
        try:
            self._function = import_dotted(self._dotted)
        except Exception as error:  # the operator's own code raises whatever it likes
            raise ValueError(f"stage {stage.name!r}: prompt_expand: {self._dotted!r}: {error}") from error
        if not callable(self._function):
            raise ValueError(f"stage {stage.name!r}: prompt_expand: {self._dotted!r}: is not callable")
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompt_expand")
        # Here, so that only a head that expands prompts loads numpy, which prompts of tensors need.
        from stagemesh.client.prompts import to_prompt

        self._to_prompt = to_prompt

    async def expand(self, prompt: prompt_pb.Prompt, params: sampling_pb.SamplingParams) -> tuple[Companion, ...]:
        """The companions of a prompt; the function gets copies, and runs on a thread.

        Args:
            params: the request's own parameters of the stage.

        Raises:
            MeshError: ADAPTER_FAILED, the function raised, took too long, or returned what it must not.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                made = await loop.run_in_executor(self._threads, self._run, prompt, params)
        except TimeoutError:
            raise self._failed(f"took longer than {self._timeout_s:g} s") from None
        except Exception as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error
        try:
            return self._checked(made, params)
        except (MeshError, ValueError) as error:
            raise self._failed(error.message if isinstance(error, MeshError) else str(error)) from None
        except Exception as error:  # values of the strangest types
            raise self._failed(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, prompt: prompt_pb.Prompt, params: sampling_pb.SamplingParams) -> Any:
        own_prompt, own_params = prompt_pb.Prompt(), sampling_pb.SamplingParams()
        own_prompt.CopyFrom(prompt)
        own_params.CopyFrom(params)
        return call_foreign(self._function, own_prompt, own_params)

    def _checked(self, made: Any, params: sampling_pb.SamplingParams) -> tuple[Companion, ...]:
        if not isinstance(made, list | tuple):
            raise ValueError(f"returned {type(made).__name__}, want a list of companions, which may be empty")
        if len(made) > MAX_COMPANIONS:
            raise ValueError(f"returned {len(made)} companions, at most {MAX_COMPANIONS} may be")
        companions = tuple(self._companion(item, f"[{place}]", params) for place, item in enumerate(made))
        suffixes = [companion.suffix for companion in companions]
        for place, suffix in enumerate(suffixes):
            if suffix in suffixes[:place]:
                raise ValueError(f"[{place}].suffix: {suffix!r}: another companion has it too")
        return companions

    def _companion(self, item: Any, at: str, params: sampling_pb.SamplingParams) -> Companion:
        if not isinstance(item, Mapping):
            raise ValueError(f"{at}: {item!r:.80}: want a mapping with suffix, role, prompt and perhaps overrides")
        for key in _REQUIRED - set(item):
            raise ValueError(f"{at}: {key} is missing")
        for key in set(item) - _REQUIRED - _OPTIONAL:
            raise ValueError(f"{at}.{key}: unknown; want suffix, role, prompt and perhaps overrides")
        suffix, role, overrides = item["suffix"], item["role"], item.get("overrides") or {}
        if not isinstance(suffix, str) or not SUFFIX.fullmatch(suffix):
            raise ValueError(f"{at}.suffix: {suffix!r:.80}: must be 1 to 32 characters of A-Z a-z 0-9 . _ : -")
        if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE_CHARS or not role.isprintable():
            raise ValueError(f"{at}.role: {role!a:.80}: must be a text of 1 to {MAX_ROLE_CHARS} printable characters")
        if not isinstance(overrides, Mapping):
            raise ValueError(f"{at}.overrides: {overrides!r:.80}: want a mapping of sampling parameters")
        prompt = self._to_prompt(item["prompt"])
        check_prompt(prompt, self._stage, f"{at}.prompt")
        given = from_mapping(self._stage, overrides, f"{at}.overrides")
        return Companion(suffix, role, prompt, merge(self._stage, params, (f"{at}.overrides", given)))

    def _failed(self, problem: str) -> MeshError:
        """The error of a request whose prompt had this problem."""
        return MeshError(Reason.ADAPTER_FAILED, f"prompt_expand {self._dotted}: {problem}", stage=self._stage.name)

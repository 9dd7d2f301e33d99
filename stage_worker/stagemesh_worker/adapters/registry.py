"""A stage's `input_adapter` -> something to call: a built-in one, or the operator's own by dotted path."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stagemesh.config import Stage
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh_worker.adapters import builtin
from stagemesh_worker.adapters.types import Adapter, StageInput
from stagemesh_worker.engines.base import EngineConfigError, EngineInput

_THREADS = 4


class AdapterRunner:
    """Runs one stage's adapter: built-in ones at once, others on a thread and within a time limit."""

    def __init__(self, stage: Stage, timeout_s: float) -> None:
        """Find the adapter.

        Raises:
            EngineConfigError: no such built-in adapter, or the dotted path leads nowhere.
        """
        self._stage = stage
        self._timeout_s = timeout_s
        self._target: Any = find_adapter(stage.input_adapter)
        self._is_builtin = stage.input_adapter is None or stage.input_adapter in builtin.BUILT_IN
        self._threads: ThreadPoolExecutor | None = None
        if not self._is_builtin:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="adapter")

    def for_task(self) -> TaskAdapter:
        """The adapter of one task, with a memory of its own where it is a class."""
        return TaskAdapter(self, self._target)

    async def call(self, function: Adapter, request: EngineInput, inputs: Sequence[StageInput]) -> EngineInput | None:
        """Run it.

        Returns:
            The engine's input, or None when the stages before made nothing, so that there is nothing to do.

        Raises:
            MeshError: ADAPTER_FAILED when it raises, takes too long, or returns nothing without cause.
        """
        try:
            if self._threads is None:
                made = function(request, inputs, self._stage)
            else:
                loop = asyncio.get_running_loop()
                async with asyncio.timeout(self._timeout_s):
                    made = await loop.run_in_executor(self._threads, function, request, inputs, self._stage)
        except MeshError:
            raise
        except TimeoutError:
            raise self.failed(f"took longer than {self._timeout_s:g} s") from None
        except Exception as error:
            raise self.failed(f"{type(error).__name__}: {error}") from error
        if made is None:
            if inputs and all(item.is_empty for item in inputs):
                return None
            raise self.failed("returned nothing though its input was not empty")
        if not isinstance(made, EngineInput):
            raise self.failed(f"returned {type(made).__name__}, want EngineInput or None")
        return made

    def close(self) -> None:
        """Let the threads end."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def failed(self, problem: str) -> MeshError:
        """The error of a task whose adapter had this problem."""
        name = self._stage.input_adapter or "by type"
        return MeshError(Reason.ADAPTER_FAILED, f"adapter {name}: {problem}", stage=self._stage.name)


class TaskAdapter:
    """One task's use of the adapter."""

    __slots__ = ("_function", "_runner", "_target")

    def __init__(self, runner: AdapterRunner, target: Any) -> None:
        self._runner = runner
        self._target = target
        self._function: Adapter | None = None if inspect.isclass(target) else target

    async def __call__(self, request: EngineInput, inputs: Sequence[StageInput]) -> EngineInput | None:
        """The engine's input for these outputs; see `AdapterRunner.call`."""
        if self._function is None:
            try:
                self._function = self._target()
            except Exception as error:
                raise self._runner.failed(f"{type(error).__name__}: {error}") from error
        assert self._function is not None
        return await self._runner.call(self._function, request, inputs)


def find_adapter(name: str | None) -> Any:
    """The adapter of that name or dotted path ("package.module.function" or "package.module:function").

    Raises:
        EngineConfigError: it is not to be found here.
    """
    if name is None:
        return builtin.by_type
    if name in builtin.BUILT_IN:
        return builtin.BUILT_IN[name]
    module_name, _, attribute = name.replace(":", ".").rpartition(".")
    if not module_name:
        raise EngineConfigError(
            f"input_adapter: {name!r}: want one of {', '.join(builtin.BUILT_IN)}, or a dotted path package.module.name"
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise EngineConfigError(f"input_adapter: {name!r}: cannot import {module_name}: {error}") from error
    except AttributeError:
        raise EngineConfigError(f"input_adapter: {name!r}: module {module_name} has no {attribute!r}") from None
    if not callable(found):
        raise EngineConfigError(f"input_adapter: {name!r}: is not callable")
    return found

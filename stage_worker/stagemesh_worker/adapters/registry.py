"""A stage's `input_adapter` -> something to call: a built-in one, or the operator's own by dotted path."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stagemesh.config import Stage
from stagemesh.config.dotted import call_foreign, import_dotted
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
        self.reads_stream = stage.edge == "stream"
        self._target: Any = find_adapter(stage.input_adapter)
        self._is_builtin = stage.input_adapter is None or stage.input_adapter in builtin.BUILT_IN
        self._threads: ThreadPoolExecutor | None = None
        if not self._is_builtin:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="adapter")

    def for_task(self) -> TaskAdapter:
        """The adapter of one task, with a memory of its own where it is a class."""
        return TaskAdapter(self, self._target)

    async def call(
        self, function: Adapter, request: EngineInput, inputs: Sequence[StageInput], *, may_wait: bool = False
    ) -> EngineInput | None:
        """Run it.

        Args:
            may_wait: it may return None for want of more input.

        Returns:
            The engine's input, or None when there is nothing to do, or not yet.

        Raises:
            MeshError: ADAPTER_FAILED when it raises, takes too long, or returns nothing without cause.
        """
        try:
            if self._threads is None:
                made = function(request, inputs, self._stage)
            else:
                loop = asyncio.get_running_loop()
                async with asyncio.timeout(self._timeout_s):
                    made = await loop.run_in_executor(
                        self._threads, call_foreign, function, request, inputs, self._stage
                    )
        except MeshError:
            raise
        except TimeoutError:
            raise self.failed(f"took longer than {self._timeout_s:g} s") from None
        except Exception as error:
            raise self.failed(f"{type(error).__name__}: {error}") from error
        if made is None:
            if may_wait or (inputs and all(item.is_empty for item in inputs)):
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

    __slots__ = ("_function", "_runner", "_target", "remembers")

    def __init__(self, runner: AdapterRunner, target: Any) -> None:
        self._runner = runner
        self._target = target
        self.remembers = inspect.isclass(target)
        """It is a class: on an edge of mode stream it may wait for more, and hears of the end."""
        self._function: Adapter | None = None if self.remembers else target

    async def __call__(self, request: EngineInput, inputs: Sequence[StageInput]) -> EngineInput | None:
        """The engine's input for these outputs; see `AdapterRunner.call`."""
        if self._function is None:
            try:
                self._function = call_foreign(self._target)
            except Exception as error:
                raise self._runner.failed(f"{type(error).__name__}: {error}") from error
        assert self._function is not None
        may_wait = self.remembers and self._runner.reads_stream
        return await self._runner.call(self._function, request, inputs, may_wait=may_wait)


def find_adapter(name: str | None) -> Any:
    """The adapter of that name or path ("package.module.function", "package.module:function" or "file.py:function").

    Raises:
        EngineConfigError: it is not to be found here.
    """
    if name is None:
        return builtin.by_type
    if name in builtin.BUILT_IN:
        return builtin.BUILT_IN[name]
    if not {".", ":"} & set(name):
        raise EngineConfigError(
            f"input_adapter: {name!r}: want one of {', '.join(builtin.BUILT_IN)}, a path package.module.name or "
            "file.py:name"
        )
    try:
        found = import_dotted(name)
    except Exception as error:  # the operator's own code raises whatever it likes
        raise EngineConfigError(f"input_adapter: {name!r}: cannot be imported: {error}") from error
    if not callable(found):
        raise EngineConfigError(f"input_adapter: {name!r}: is not callable")
    return found

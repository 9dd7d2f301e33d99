"""The vLLM engine: AsyncLLM behind the mesh's four verbs."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from stagemesh.config import Stage
from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_worker.engines.base import DeviceSet, Engine, EngineConfigError, EngineLoad, EngineTask, TaskSink

log = logging.getLogger(__name__)

DEATH_POLL_S = 0.5
EXIT_CODE_POLLS = 10


class VllmEngine(Engine):
    """One vLLM engine with one model."""

    name = "vllm"

    def __init__(self, stage: Stage, devices: DeviceSet) -> None:
        super().__init__(stage, devices)
        # vLLM reads its environment at import, which is why it is imported late.
        from stagemesh_worker.engines.vllm.adapters import LoraAdapters
        from stagemesh_worker.engines.vllm.control import METHODS
        from stagemesh_worker.engines.vllm.load import LoadRecord

        self.call_methods = METHODS | set(stage.control_methods)  # type: ignore[misc]
        self._record = LoadRecord()
        self._loras = LoraAdapters(stage.lora_modules)
        self._llm: Any = None
        self._reserved_port: socket.socket | None = None
        self._processes: list[Any] = []
        self._builder: Any = None
        self._stop_ids: frozenset[int] = frozenset()
        self._stopping = False

    @classmethod
    def check(cls, stage: Stage) -> None:
        """Check names of `engine_args` and `default_sampling_params`. Imports vLLM."""
        from stagemesh_worker.engines.vllm.arguments import check_arguments

        check_arguments(stage)

    def prepare(self) -> None:
        """Start EngineCore and wait until the model is loaded."""
        from stagemesh_worker.engines.vllm.arguments import engine_arguments
        from stagemesh_worker.engines.vllm.hand_off import side_channel
        from stagemesh_worker.engines.vllm.launch import launch, set_environment, why_refused

        set_environment(self.devices)
        variables, self._reserved_port = side_channel(self.stage, self.host, os.environ)
        os.environ.update(variables)
        self.version = importlib.metadata.version(_distribution())
        arguments = engine_arguments(self.stage, self.devices)
        self.report_phase(f"loading {self.stage.model}")
        try:
            self._llm = launch(arguments, self._record.logger(), self.devices)
        except (TypeError, ValueError, ImportError) as error:  # pydantic's are ValueErrors: a value that vLLM refuses
            raise EngineConfigError(why_refused(error)) from error
        manager = self._llm.engine_core.resources.engine_manager
        self._processes = list(manager.processes) if manager is not None else []
        self.max_concurrency = self._llm.vllm_config.scheduler_config.max_num_seqs

    async def start(self) -> None:
        """Set up tokenizer and prompts; EngineCore runs already."""
        from stagemesh_worker.engines.vllm.media import MediaReader
        from stagemesh_worker.engines.vllm.prompts import PromptBuilder

        model = self._llm.model_config
        tokenizer = None if model.skip_tokenizer_init else self._llm.get_tokenizer()
        try:
            media = MediaReader(model, f"stage{self.stage.stage_id}:rep{self.replica_id}")
        except ValueError as error:
            raise EngineConfigError(str(error)) from error
        self._builder = PromptBuilder(tokenizer, model, media)
        ends = {self._llm.renderer.get_eos_token_id()} if tokenizer is not None else set()
        listed = self._llm.input_processor.generation_config_fields.get("eos_token_id")
        ends |= set(listed) if isinstance(listed, list) else {listed}
        self._stop_ids = frozenset(ends - {None})

    def probe_task(self) -> stage_pb.SubmitTask:
        """One token; from a token where the model has no tokenizer."""
        task = super().probe_task()
        if self._llm.model_config.skip_tokenizer_init:
            task.prompt.tokens.ids.append(1)
        return task

    async def run(self, task: EngineTask, sink: TaskSink) -> None:
        """Run one task."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        from stagemesh_worker.engines.vllm.generation import Generation
        from stagemesh_worker.engines.vllm.pooling import Pooling
        from stagemesh_worker.engines.vllm.refusal import MISPLACED_MEDIA, refused
        from stagemesh_worker.engines.vllm.streaming import StreamingGeneration

        lora = self._loras.of_task(task.submit)
        try:
            if self._llm.model_config.runner_type == "pooling":
                await Pooling(task, sink, self._builder, lora).run(self._llm)
            elif task.more_input is not None:
                await StreamingGeneration(task, sink, self._builder, lora).run(self._llm)
            else:
                await Generation(task, sink, self._builder, self._stop_ids, lora).run(self._llm)
        except EngineDeadError as error:
            raise MeshError(Reason.ENGINE_DEAD, self._death()) from error
        except (VLLMClientError, ValueError, TypeError) as error:
            raise refused(error) from error
        except EngineGenerateError as error:
            cause = error.__cause__ or error
            if MISPLACED_MEDIA in str(cause):
                problem = "the prompt must have a placeholder for each item; a chat prompt gets them from the template"
                raise invalid("prompt.media", len(task.input.media), problem) from error
            raise MeshError(Reason.STAGE_FAILED, f"{type(cause).__name__}: {cause}") from error

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one of `call_methods`."""
        from stagemesh_worker.engines.vllm.control import call

        return await call(self._llm, self._loras, self._check_health, method, args, kwargs)

    def load(self) -> EngineLoad:
        """Exact as of the engine's last step."""
        return self._record.load(self._llm.get_num_unfinished_requests() if self._llm is not None else 0)

    async def died(self) -> str:
        """Wait until EngineCore has ended."""
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        sentinels = [process.sentinel for process in self._processes]
        for sentinel in sentinels:
            loop.add_reader(sentinel, gone.set)
        try:
            while not gone.is_set() and not self._llm.errored:
                try:
                    async with asyncio.timeout(DEATH_POLL_S):
                        await gone.wait()
                except TimeoutError:
                    continue
        finally:
            for sentinel in sentinels:
                loop.remove_reader(sentinel)
        for _ in range(EXIT_CODE_POLLS):
            # Its pipe closes a moment before its exit code can be had.
            if all(process.exitcode is None for process in self._processes):
                await asyncio.sleep(0.05)
        return self._death()

    async def check_progress(self, timeout_s: float) -> None:
        """A call into EngineCore's own loop: it answers between two steps."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._llm.is_sleeping()
        except TimeoutError:
            raise MeshError(Reason.ENGINE_STUCK, f"EngineCore did not answer within {timeout_s:g} s") from None

    async def _check_health(self) -> None:
        await self._llm.check_health()
        await self.check_progress(10.0)

    async def stop(self) -> None:
        """End EngineCore at once."""
        if self._llm is None or self._stopping:
            return
        self._stopping = True
        # It joins processes, which must not hold the event loop.
        await asyncio.to_thread(self._llm.shutdown, timeout=0)

    def _death(self) -> str:
        codes = {process.name: process.exitcode for process in self._processes}
        ends = [f"{name} exited with code {code}" for name, code in codes.items() if code is not None]
        return ", ".join(ends) or "EngineCore is gone"


def _distribution() -> str:
    """The distribution that brought the module `vllm`."""
    names = importlib.metadata.packages_distributions().get("vllm", ["vllm"])
    return names[0]

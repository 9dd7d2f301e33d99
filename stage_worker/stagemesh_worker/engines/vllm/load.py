"""What the engine says of its load at every step."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from stagemesh_worker.engines.base import EngineLoad


class LoadRecord:
    """The last step's figures of all data-parallel ranks."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[int, int, float]] = {}
        self.steps = 0
        self._prompt_tokens = [0, 0, 0]
        """Computed, cached, received: since start."""
        self.last_step_at = time.monotonic()
        self.busy_since: float | None = None

    def step(self, rank: int, running: int, waiting: int, kv_cache_usage: float) -> None:
        """The engine made a step."""
        self._ranks[rank] = (running, waiting, kv_cache_usage)
        self.steps += 1
        self.last_step_at = time.monotonic()

    def read(self, prompt: Any) -> None:
        """Prompts were read in that step; `prompt` is vLLM's count of their tokens by where they came from."""
        for index, count in enumerate((prompt.computed, prompt.local_cache_hit, prompt.external_kv_transfer)):
            self._prompt_tokens[index] += count

    def load(self, unfinished: int) -> EngineLoad:
        """The load, given the exact number of requests that are not finished."""
        if not unfinished:
            self.busy_since = None
            return EngineLoad(0, 0, 0.0, self.steps, 0.0, *self._prompt_tokens)
        now = time.monotonic()
        if self.busy_since is None:
            self.busy_since = now
        running = min(unfinished, sum(rank[0] for rank in self._ranks.values()))
        usage = max((rank[2] for rank in self._ranks.values()), default=0.0)
        since = now - max(self.last_step_at, self.busy_since)
        return EngineLoad(running, unfinished - running, usage, self.steps, since, *self._prompt_tokens)

    def logger(self) -> type[StatLoggerBase]:
        """The class that vLLM makes one instance of for each rank."""
        record = self

        class Logger(StatLoggerBase):  # type: ignore[misc]
            """Notes each step."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                self._rank = engine_index

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
            ) -> None:
                """One step of one rank."""
                prompt = getattr(iteration_stats, "prompt_token_stats", None)  # younger than vLLM's oldest that serves
                if prompt is not None:
                    record.read(prompt)
                if scheduler_stats is not None:
                    waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
                    usage = scheduler_stats.kv_cache_usage
                    record.step(engine_idx, scheduler_stats.num_running_reqs, waiting, usage)

            def log_engine_initialized(self) -> None:
                """Nothing to say."""

        return Logger

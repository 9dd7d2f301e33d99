"""Watches an engine's progress and reports its load: liveness means progress, not an open socket."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh.wire import duration
from stagemesh_worker.engines.base import Engine
from stagemesh_worker.replica.control import Healthy, Load, Message, Unhealthy
from stagemesh_worker.replica.memory import resident_bytes

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.5
MEMORY_INTERVAL_S = 5.0
GIVE_UP_FACTOR = 3.0
"""After so many progress timeouts without a step the replica gives up, so that its node starts it anew."""


class Watchdog:
    """Reports load every half second, and says when the engine is stuck and when it is not any more."""

    def __init__(
        self,
        engine: Engine,
        progress_timeout_s: float,
        tell_agent: Callable[[Message], None],
        tell_heads: Callable[[replica_pb.ReplicaLoad], None],
    ) -> None:
        self._engine = engine
        self._timeout_s = progress_timeout_s
        self._tell_agent = tell_agent
        self._tell_heads = tell_heads
        self._memory_bytes = 0
        self._memory_at = -MEMORY_INTERVAL_S
        self._last_reported: replica_pb.ReplicaLoad | None = None
        self._checked_at = time.monotonic()
        self._stuck_since: float | None = None

    async def run(self) -> None:
        """Until cancelled. Raises MeshError(ENGINE_STUCK) when the engine stays stuck."""
        while True:
            await self._report()
            await self._judge()
            await asyncio.sleep(LOAD_INTERVAL_S)

    async def _report(self) -> None:
        now, load = time.monotonic(), self._engine.load()
        if now - self._memory_at >= MEMORY_INTERVAL_S:
            self._memory_at = now
            self._memory_bytes = await asyncio.to_thread(resident_bytes)
        self._tell_agent(
            Load(
                load.running,
                load.waiting,
                load.kv_cache_usage,
                load.steps,
                load.since_progress_s,
                self._memory_bytes,
                load.prompt_tokens_computed,
                load.prompt_tokens_cached,
                load.prompt_tokens_received,
            )
        )
        wire = replica_pb.ReplicaLoad(
            running=load.running,
            waiting=load.waiting,
            kv_cache_usage=load.kv_cache_usage,
            engine_steps=load.steps,
            since_progress=duration(load.since_progress_s),
            memory_bytes=self._memory_bytes,
            prompt_tokens_computed=load.prompt_tokens_computed,
            prompt_tokens_cached=load.prompt_tokens_cached,
            prompt_tokens_received=load.prompt_tokens_received,
        )
        if wire != self._last_reported:
            self._last_reported = wire
            self._tell_heads(wire)

    async def _judge(self) -> None:
        """Ask the engine to prove that it lives, when it looks stuck, and every timeout when it is idle."""
        now = time.monotonic()
        looks_stuck = self._engine.load().since_progress_s >= self._timeout_s
        if not looks_stuck and self._stuck_since is None and now - self._checked_at < self._timeout_s:
            return
        try:
            # An engine may answer while it makes no step, as one that is paused does: that is no fault.
            async with asyncio.timeout(2 * self._timeout_s):
                await self._engine.check_progress(min(self._timeout_s, 10.0) if looks_stuck else self._timeout_s)
        except (MeshError, TimeoutError) as error:
            await self._stuck(str(error) or "the engine does not answer")
        else:
            self._checked_at = time.monotonic()
            if self._stuck_since is not None:
                log.warning("the engine makes progress again")
                self._stuck_since = None
                self._tell_agent(Healthy())

    async def _stuck(self, reason: str) -> None:
        now = time.monotonic()
        if self._stuck_since is None:
            self._stuck_since = now
            log.error("the engine is stuck: %s", reason)
            self._tell_agent(Unhealthy(reason))
        elif now - self._stuck_since >= (GIVE_UP_FACTOR - 1) * self._timeout_s:
            raise MeshError(Reason.ENGINE_STUCK, f"no progress for {now - self._stuck_since:.0f} s: {reason}")

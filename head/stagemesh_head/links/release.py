"""Tells replicas which tensors nobody needs any more, in batches; what is not told they sweep by age."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import defaultdict
from collections.abc import Iterable
from itertools import count
from math import ceil
from time import monotonic

import grpc

from stagemesh.rpc.options import open_channel
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh.v1 import tensor_pb2_grpc as tensor_rpc

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
COALESCE_S = 0.1
"""What is due within the same such time travels together: a stream's tensors are due one by one."""
TRIES = 4
RETRY_S = 2.0
"""Before the second try, and twice as long before each further one. A busy replica answers late; its sweep comes only
after ten minutes."""
MAX_PENDING = 100_000
"""Beyond that the rest is left to the replicas' sweep."""


class TensorReleaser:
    """Releases tensors of requests that are over."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, str, str, int]] = []
        """(when, order, endpoint, key, which try)"""
        self._order = count()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    def release(self, references: Iterable[tensor_pb.TensorRef], after_s: float) -> None:
        """Have tensors dropped by their owners, `after_s` seconds from now."""
        due = ceil((monotonic() + after_s) / COALESCE_S) * COALESCE_S
        for reference in references:
            self._push(due, reference.endpoint, reference.key, 1)
        self._wake.set()
        if self._task is None and self._due and not self._is_stopping:
            self._task = asyncio.create_task(self._run(), name="tensor releases")

    def _push(self, due: float, endpoint: str, key: str, number: int) -> None:
        if len(self._due) < MAX_PENDING:
            heapq.heappush(self._due, (due, next(self._order), endpoint, key, number))

    async def stop(self) -> None:
        """Release what is pending, now, and end."""
        self._is_stopping = True
        self._wake.set()
        task, self._task = self._task, None
        if task is not None:
            await task

    async def _run(self) -> None:
        while not self._is_stopping:
            self._wake.clear()
            delay = self._due[0][0] - monotonic() if self._due else None
            try:
                async with asyncio.timeout(delay):
                    await self._wake.wait()
            except TimeoutError:
                await self._release_until(monotonic())
        await self._release_until(float("inf"))

    async def _release_until(self, now: float) -> None:
        batches = defaultdict[tuple[str, int], list[str]](list)
        while self._due and self._due[0][0] <= now:
            _, _, endpoint, key, number = heapq.heappop(self._due)
            batches[endpoint, number].append(key)
        if batches:
            await asyncio.gather(*(self._tell(*about, keys) for about, keys in batches.items()))

    async def _tell(self, endpoint: str, number: int, keys: list[str]) -> None:
        channel = open_channel(endpoint)
        try:
            stub = tensor_rpc.TensorServiceStub(channel)
            await stub.ReleaseTensors(tensor_pb.ReleaseTensorsRequest(keys=keys), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            if number < TRIES and not self._is_stopping:
                due = monotonic() + RETRY_S * 2.0 ** (number - 1)
                for key in keys:
                    self._push(due, endpoint, key, number + 1)
            # Else gone with its replica, or swept later.
            log.debug("%d tensors of %s were not released: %s", len(keys), endpoint, error)
        finally:
            await channel.close()

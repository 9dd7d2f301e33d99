"""A node agent's health service, for probes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from stagemesh.rpc.health import Health
from stagemesh.rpc.server import bind, create_server

PERIOD_S = 0.5
SERVICES = ("stagemesh.v1.StageService",)


@contextlib.asynccontextmanager
async def health_service(address: str, is_ready: Callable[[], bool]) -> AsyncIterator[None]:
    """Serve grpc.health.v1 at `address` (host:port) as long as the context is open.

    The process is alive as long as it answers, since it ends and restarts its replicas itself; StageService is
    serving while `is_ready` says so.

    Raises:
        OSError, SecurityError: the address cannot be bound, or must not be.
    """
    server = create_server()
    health = Health(server, SERVICES)
    bind(server, address)
    await server.start()
    await health.set_alive(True)
    task = asyncio.create_task(_follow(health, is_ready), name="health")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await health.set_ready(False)
        await server.stop(0)


async def _follow(health: Health, is_ready: Callable[[], bool]) -> None:
    said = None
    while True:
        if (now := is_ready()) is not said:
            said = now
            await health.set_ready(now)
        await asyncio.sleep(PERIOD_S)

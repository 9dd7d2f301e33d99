"""grpc.health.v1 and reflection, the same way on every server.

The empty service name is the process: it stays SERVING while the process is alive and busy (liveness). Each service's
full name is its readiness, which goes to NOT_SERVING first when draining.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Health state of one server."""

    def __init__(self, server: grpc.aio.Server, services: Sequence[str]) -> None:
        self._servicer = health.aio.HealthServicer()
        self._services = tuple(services)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    async def set_alive(self, alive: bool) -> None:
        """Set liveness, the empty service name."""
        await self._servicer.set("", _SERVING if alive else _NOT_SERVING)

    async def set_ready(self, ready: bool) -> None:
        """Set the readiness of every service of the server."""
        for name in self._services:
            await self._servicer.set(name, _SERVING if ready else _NOT_SERVING)

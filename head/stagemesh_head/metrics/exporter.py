"""The metrics of a head or gateway, put together, and where they can be read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from time import monotonic
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from stagemesh.addresses import host_and_port
from stagemesh.config import Pipeline
from stagemesh.rpc.security import Security
from stagemesh_head.gateway import Gateway
from stagemesh_head.metrics.gateway import GatewayMetrics
from stagemesh_head.metrics.nodes import NodeMetrics
from stagemesh_head.metrics.requests import RequestMetrics
from stagemesh_head.metrics.tasks import TaskMetrics
from stagemesh_head.registry.registry import Registry
from stagemesh_head.registry.rows import Membership

log = logging.getLogger(__name__)

LAG_PERIOD_S = 0.25
SCRAPE_S = 10.0
"""For a scraper to say what it wants, and to read the answer: each one has a thread."""


class Exporter:
    """Counts what passes through a gateway, and serves that and its gauges to scrapers."""

    def __init__(
        self, pipelines: Sequence[Pipeline], gateway: Gateway, membership: Membership, registry: Registry | None = None
    ) -> None:
        """Args: registry: a head's own; a gateway, which only follows one, says nothing of nodes and replicas."""
        self._collected = CollectorRegistry()
        self._server: WSGIServer | None = None
        self._watch: asyncio.Task[None] | None = None
        self._lag = Gauge(
            "stagemesh_event_loop_lag_seconds", "How late the process's event loop is.", registry=self._collected
        )
        requests = RequestMetrics(self._collected)
        tasks = TaskMetrics(self._collected, membership)
        gateway.orchestrator.on_ended = requests.ended
        gateway.orchestrator.on_quiet = tasks.request_quiet
        self._collected.register(GatewayMetrics(gateway, pipelines))
        if registry is not None:
            self._collected.register(NodeMetrics(registry))

    def start(self, address: str) -> None:
        """Serve `/metrics` on host:port; port 0 picks one, which the log tells.

        Raises:
            ValueError: that is no address.
            SecurityError: an address wider than loopback without TLS.
            OSError: it cannot be had.
        """
        host, port = host_and_port(address)
        Security.from_environment().check_bind(host)
        try:
            server, _thread = start_http_server(port, addr=host.strip("[]"), registry=self._collected)
        except OSError as error:
            raise OSError(f"cannot serve metrics on {address}: {error.strerror}") from error
        server.RequestHandlerClass = _Scrape
        self._server = server
        self._watch = asyncio.create_task(self._watch_lag(), name="event loop lag")
        log.info("serving metrics on %s:%d", host, server.server_address[1])

    def close(self) -> None:
        """Serve no more."""
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    async def _watch_lag(self) -> None:
        while True:
            before = monotonic()
            await asyncio.sleep(LAG_PERIOD_S)
            self._lag.set(max(0.0, monotonic() - before - LAG_PERIOD_S))


class _Scrape(WSGIRequestHandler):
    """One connection of whoever reads the metrics, ended when it says nothing, and no reason for a traceback."""

    timeout = SCRAPE_S

    def handle(self) -> None:
        """Answer it. A peer that is silent or gone is no error of ours."""
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""

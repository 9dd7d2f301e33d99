"""Counts requests as they end."""

from __future__ import annotations

from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Histogram

from stagemesh_head.metrics.buckets import SECONDS
from stagemesh_head.orchestration.run import RequestRun


class RequestMetrics:
    """Requests by outcome, and how long they took."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "stagemesh_requests", "Requests that ended, by outcome.", ["pipeline", "outcome"], registry=registry
        )
        self._seconds = Histogram(
            "stagemesh_request_seconds", "From arrival to the end.", ["pipeline"], buckets=SECONDS, registry=registry
        )

    def ended(self, run: RequestRun) -> None:
        """Count a request whose stream has its end."""
        pipeline = run.plan.pipeline.name
        self._requests.labels(pipeline, run.stream.outcome).inc()
        self._seconds.labels(pipeline).observe(monotonic() - run.started_at)

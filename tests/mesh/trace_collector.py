"""A collector of traces: OpenTelemetry's own service, as a server that keeps every span it is sent."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_rpc

ERROR = 2
PATIENCE_S = 20.0


@dataclass(frozen=True)
class SeenSpan:
    """One span as it arrived."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    is_error: bool
    message: str
    attributes: dict[str, Any] = field(default_factory=dict)
    resource: dict[str, Any] = field(default_factory=dict)


class TraceCollector(otlp_rpc.TraceServiceServicer):
    """Keeps spans; `trace` waits for those of one trace."""

    def __init__(self) -> None:
        self._spans: list[SeenSpan] = []
        self._news = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        otlp_rpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait(10)

    def Export(self, request: otlp.ExportTraceServiceRequest, context: object) -> otlp.ExportTraceServiceResponse:
        with self._news:
            for group in request.resource_spans:
                resource = _values(group.resource.attributes)
                for scope in group.scope_spans:
                    self._spans += [_seen(span, resource) for span in scope.spans]
            self._news.notify_all()
        return otlp.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[SeenSpan]:
        with self._news:
            return list(self._spans)

    def trace(self, trace_id: str, *names: str) -> list[SeenSpan]:
        """All spans of a trace, by their beginning, once each of `names` is among them as often as it is named."""
        deadline = time.monotonic() + PATIENCE_S
        with self._news:
            while True:
                found = sorted((s for s in self._spans if s.trace_id == trace_id), key=lambda span: span.begin_ns)
                have = [span.name for span in found]
                missing = [name for name in names if have.count(name) < names.count(name)]
                if not missing:
                    return found
                left = deadline - time.monotonic()
                assert left > 0, f"{missing} did not come; there are {have}"
                self._news.wait(left)


def _seen(span: Any, resource: dict[str, Any]) -> SeenSpan:
    return SeenSpan(
        service=resource["service.name"],
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        is_error=span.status.code == ERROR,
        message=span.status.message,
        attributes=_values(span.attributes),
        resource=resource,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}

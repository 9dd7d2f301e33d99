"""Spans of the mesh's processes, by OpenTelemetry; nothing of it is imported unless an operator asked for traces.

Traces are on when an OTLP endpoint is set, by `--otlp-endpoint` or OpenTelemetry's own variables, which are obeyed as
everywhere: OTEL_EXPORTER_OTLP_*, OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_RESOURCE_ATTRIBUTES, OTEL_SDK_DISABLED. They are
in the environment, so that child processes have them too.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from stagemesh.rpc.errors import MeshError
from stagemesh.telemetry.context import TraceContext

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
CLOSE_S = 2.0
"""For the last spans, at the end of a process."""


class TracingError(ValueError):
    """Traces were asked for and cannot be had; the text says why."""


def ask_for_traces(endpoint: str) -> None:
    """Have this process and its children send traces to an OTLP endpoint: a URL, or HOST:PORT for one without TLS."""
    os.environ[ENDPOINT_VARIABLE] = endpoint if "://" in endpoint else f"http://{endpoint}"
    os.environ.pop(TRACES_ENDPOINT_VARIABLE, None)


def traces_endpoint(environment: Mapping[str, str] | None = None) -> str:
    """Where traces go, by the environment; empty: nobody asked for any."""
    given = os.environ if environment is None else environment
    if given.get("OTEL_SDK_DISABLED", "").lower() == "true" or given.get("OTEL_TRACES_EXPORTER") == "none":
        return ""
    return given.get(TRACES_ENDPOINT_VARIABLE) or given.get(ENDPOINT_VARIABLE) or ""


def check_tracing() -> None:
    """Raise TracingError when traces were asked for and this machine lacks what makes them."""
    if traces_endpoint():
        _exporter_class()


def make_tracer(component: str, **fields: str | int) -> Tracer | None:
    """The tracer of this process; None when nobody asked for traces.

    It has a thread and a gRPC channel: a process that forks calls this afterwards.

    Args:
        component: "head", "gateway", "replica" or "client"; the service is called `stagemesh-COMPONENT`.
        fields: what the spans' resource says besides, such as stage and replica.

    Raises:
        TracingError: a package is missing, or a variable is wrong.
    """
    if not traces_endpoint():
        return None
    exporter_class = _exporter_class()
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {f"stagemesh.{key}": value for key, value in fields.items()}
    if "OTEL_SERVICE_NAME" not in os.environ and "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        named["service.name"] = f"stagemesh-{component}"
    # Not the process's own provider: an engine's library may set that one up for itself.
    provider = TracerProvider(resource=Resource.create({**named, "process.pid": os.getpid()}), shutdown_on_exit=False)
    try:
        provider.add_span_processor(BatchSpanProcessor(exporter_class()))
    except (ValueError, TypeError) as error:
        raise TracingError(f"traces to {traces_endpoint()}: {error}") from error
    return Tracer(provider)


def _exporter_class() -> Any:
    protocol = next((value for name in _PROTOCOL_VARIABLES if (value := os.environ.get(name))), "grpc")
    if protocol not in _EXPORTERS:
        raise TracingError(f"{_PROTOCOL_VARIABLES[1]}: {protocol!r}: want one of {', '.join(_EXPORTERS)}")
    try:
        importlib.import_module("opentelemetry.sdk.trace")
        return importlib.import_module(_EXPORTERS[protocol]).OTLPSpanExporter
    except ImportError as error:
        raise TracingError(
            f"traces to {traces_endpoint()} need a package that is not installed here ({error}): "
            "pip install 'stagemesh[telemetry]'"
        ) from None


class Tracer:
    """Starts spans. Moments are on the monotonic clock, in seconds; now, where none is given."""

    def __init__(self, provider: Any) -> None:
        """`provider` is OpenTelemetry's, of the SDK."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("stagemesh")
        self._propagator = TraceContextTextMapPropagator()
        self._kinds = {kind.name.lower(): kind for kind in SpanKind}

    def start(
        self,
        name: str,
        parent: TraceContext | Span | None = None,
        *,
        kind: str = "internal",
        at: float | None = None,
        **attributes: Any,
    ) -> Span:
        """Begin a span; its owner ends it.

        Args:
            parent: the span it belongs to, here or in another process.
            kind: "server", "client" or "internal".
            attributes: texts and numbers, named `stagemesh.KEY` in the trace.
        """
        from opentelemetry.trace import set_span_in_context

        if isinstance(parent, Span):
            context = set_span_in_context(parent.raw)
        else:
            context = self._propagator.extract(parent.headers() if parent is not None else {})
        raw = self._tracer.start_span(
            name, context, kind=self._kinds[kind], start_time=_nanoseconds(at), attributes=_named(attributes)
        )
        return Span(raw, self._propagator)

    async def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is left, for as long as `timeout_s`. No span begins afterwards."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def shut_down() -> None:
            try:
                self._provider.shutdown()
            finally:
                loop.call_soon_threadsafe(done.set)

        # A thread of its own: nobody waits for it at exit when the collector does not answer.
        threading.Thread(target=_quietly, args=(shut_down,), name="last spans", daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                await done.wait()
        except TimeoutError:
            return


class Span:
    """A span that was begun."""

    __slots__ = ("_propagator", "raw")

    def __init__(self, raw: Any, propagator: Any) -> None:
        self.raw = raw
        """OpenTelemetry's own object."""
        self._propagator = propagator

    @property
    def is_recording(self) -> bool:
        """Whether it will be sent: it was sampled and has not ended."""
        return bool(self.raw.is_recording())

    @property
    def context(self) -> TraceContext:
        """For those who go on with it in another process."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(self.raw))
        return TraceContext(carrier.get("traceparent", ""), carrier.get("tracestate", ""))

    def set(self, **attributes: Any) -> None:
        """Add attributes."""
        self.raw.set_attributes(_named(attributes))

    def event(self, name: str, **attributes: Any) -> None:
        """Note a moment within it."""
        self.raw.add_event(name, _named(attributes))

    def end(self, error: MeshError | None = None, *, at: float | None = None) -> None:
        """It is over, with an error or well. The second time nothing happens."""
        if not self.is_recording:
            return
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            told = {f"error.{key}": value for key, value in error.metadata.items()}
            self.set(reason=error.reason.value, **told)
            self.raw.set_status(Status(StatusCode.ERROR, error.message))
        self.raw.end(_nanoseconds(at))


def _quietly(work: Any) -> None:
    try:
        work()
    except RuntimeError:
        return  # the loop is closed: nobody waits any more


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"stagemesh.{key}": value for key, value in attributes.items() if value is not None}


def _nanoseconds(at: float | None) -> int | None:
    """A monotonic moment on the wall clock."""
    return None if at is None else time.time_ns() - int((time.monotonic() - at) * 1e9)

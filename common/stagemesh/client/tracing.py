"""The client's part of a trace: the caller's headers, or a span in programs that use OpenTelemetry themselves.

The client does not bring OpenTelemetry: a program that traces has imported it. The span then is a child of the
program's current one, and goes where the program sends its own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stagemesh.client.errors import invalid

if TYPE_CHECKING:
    from stagemesh.client.journey import Journey

HEADERS = ("traceparent", "tracestate")
SPAN_NAME = "stagemesh.generate"
Metadata = tuple[tuple[str, str], ...]


def given_headers(headers: Mapping[str, str] | None) -> Metadata | None:
    """The caller's own trace headers as metadata, if it gave any. Raises InvalidRequest for others than W3C's."""
    if headers is None:
        return None
    for name, value in headers.items():
        if name not in HEADERS or not isinstance(value, str) or not value.isascii():
            raise invalid("trace_headers", {name: value}, f"want {' and '.join(HEADERS)}, as W3C has them")
    return tuple(headers.items())


@contextmanager
def traced(journey: Journey) -> Iterator[Metadata]:
    """Metadata for the calls of one request. Without headers of the caller's, in a program that traces, a span around
    them.
    """
    given = journey.trace_headers
    api: Any = sys.modules.get("opentelemetry.trace")
    if given is not None or api is None:
        yield tuple(given or ())
        return
    propagate: Any = importlib.import_module("opentelemetry.propagate")
    tracer = api.get_tracer("stagemesh.client")
    named = {"stagemesh.request_id": journey.request_id}
    span = tracer.start_span(SPAN_NAME, kind=api.SpanKind.CLIENT, attributes=named)
    carrier: dict[str, str] = {}
    propagate.inject(carrier, api.set_span_in_context(span))
    try:
        yield tuple((name, value) for name, value in carrier.items() if name in HEADERS)
    except Exception as error:
        span.set_status(api.Status(api.StatusCode.ERROR, str(error)))
        raise
    finally:
        span.end()

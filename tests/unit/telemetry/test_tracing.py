"""Trace context as it comes in, and when traces are wanted at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stagemesh import InvalidRequest
from stagemesh.client.tracing import given_headers
from stagemesh.telemetry import tracing
from stagemesh.telemetry.context import NO_TRACE, TraceContext

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_callers_span_is_read_from_its_headers_and_given_on_unchanged() -> None:
    context = TraceContext.read([("authorization", "Bearer x"), ("traceparent", PARENT), ("tracestate", "a=1,b=2")])
    assert context == TraceContext(PARENT, "a=1,b=2")
    assert context.headers() == {"traceparent": PARENT, "tracestate": "a=1,b=2"}
    later = "01" + PARENT[2:] + "-what-a-later-version-adds"
    assert TraceContext.read([("traceparent", later)]).headers() == {"traceparent": later}


@pytest.mark.parametrize(
    "wrong",
    ["", "junk", PARENT.upper(), "ff" + PARENT[2:], PARENT[:-3], f"00-{'0' * 32}-b7ad6b7169203331-01", PARENT + "\n",
     f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01"],
)  # fmt: skip
def test_headers_that_are_none_begin_a_new_trace(wrong: str) -> None:
    assert TraceContext.read([("traceparent", wrong), ("tracestate", "a=1")]) == NO_TRACE
    assert NO_TRACE.headers() == {}


def test_a_state_that_is_too_long_is_left_out() -> None:
    assert TraceContext.read([("traceparent", PARENT), ("tracestate", "a" * 513)]) == TraceContext(PARENT)


@pytest.mark.parametrize("given", [{"x-request-id": "7"}, {"traceparent": "é"}, {"traceparent": 7}])
def test_a_client_refuses_headers_that_are_not_of_a_trace(given: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="want traceparent and tracestate"):
        given_headers(given)


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}, "http://a:1"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b:2"},
            "http://b:2",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ""),
    ],
)
def test_traces_are_made_when_there_is_somewhere_to_send_them(environment: dict[str, str], endpoint: str) -> None:
    assert tracing.traces_endpoint(environment) == endpoint


def test_a_protocol_that_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    with pytest.raises(tracing.TracingError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL: 'carrier-pigeon': want one of grpc"):
        tracing.check_tracing()


def test_nothing_of_opentelemetry_is_imported_unless_traces_are_wanted() -> None:
    code = (
        "import sys, os; [os.environ.pop(name) for name in list(os.environ) if name.startswith('OTEL')];"
        "import stagemesh_head.app, stagemesh_worker.replica.host, stagemesh;"
        "from stagemesh.telemetry.tracing import make_tracer; assert make_tracer('head') is None;"
        "print(*(name for name in sys.modules if name.startswith('opentelemetry')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


async def test_the_last_spans_do_not_hold_up_a_process_whose_collector_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    tracer = tracing.make_tracer("head")
    assert tracer is not None
    tracer.start("request").end()
    begin = tracing.time.monotonic()
    await tracer.close(0.5)
    assert tracing.time.monotonic() - begin < 5

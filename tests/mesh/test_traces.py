"""Traces of a whole mesh, process by process, as a collector sees them."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stagemesh
from stagemesh import Client, Finished, TextDelta
from stagemesh.client.admin import AdminClient
from tests.mesh.trace_collector import SeenSpan, TraceCollector

PIPELINE = """
name: sketch
stages:
- name: writer
  engine: synthetic
  prompt_expand: tests.mesh.expansions.when_asked
  final_output: true
  engine_args: {tokens_per_second: 40, first_token_delay_s: 0.05, fail_on: forbidden, max_num_seqs: 1}
  runtime: {num_replicas: 2, shared_devices: true}
  default_sampling_params: {max_tokens: 4}
- {name: painter, stage_type: diffusion, engine: synthetic, runtime: {shared_devices: true}}
"""
WHOLE = (
    "request", "pick writer", "task writer", "stage writer", "engine", "prefill", "decode",
    "pick painter", "task painter", "stage painter", "transfer", "engine", "generate",
)  # fmt: skip


@pytest.fixture(scope="module")
def collector() -> Iterator[TraceCollector]:
    running = TraceCollector()
    yield running
    running.close()


@pytest.fixture(scope="module")
def mesh(collector: TraceCollector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[stagemesh.Mesh]:
    path = tmp_path_factory.mktemp("traces") / "sketch.yaml"
    path.write_text(PIPELINE)
    told = ["--otlp-endpoint", collector.address]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with stagemesh.Mesh(path, head_arguments=told, worker_arguments=told) as running:
            yield running


class Caller:
    """The span that a client would have."""

    def __init__(self) -> None:
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.headers = {"traceparent": f"00-{self.trace_id}-{self.span_id}-01", "tracestate": "vendor=7"}


def of(spans: list[SeenSpan], name: str, **attributes: object) -> list[SeenSpan]:
    wanted = {f"stagemesh.{key}": value for key, value in attributes.items()}
    return [span for span in spans if span.name == name and wanted.items() <= span.attributes.items()]


def test_one_connected_trace_goes_from_the_client_to_every_engine(
    mesh: stagemesh.Mesh, collector: TraceCollector
) -> None:
    caller = Caller()
    list(mesh.generate("a wish", request_id="whole", trace_headers=caller.headers, timeout=30))
    spans = collector.trace(caller.trace_id, *WHOLE)
    parents = {span.span_id: span for span in spans}
    above = {(span.name, parents[span.parent_id].name if span.parent_id in parents else "the client") for span in spans}
    assert above == {
        ("request", "the client"),
        *((f"{what} {stage}", "request") for what in ("pick", "task") for stage in ("writer", "painter")),
        ("stage writer", "task writer"),
        ("stage painter", "task painter"),
        ("transfer", "stage painter"),
        ("engine", "stage writer"),
        ("engine", "stage painter"),
        ("prefill", "engine"),
        ("decode", "engine"),
        ("generate", "engine"),
    }
    (root,) = of(spans, "request", request_id="whole", pipeline="sketch", outcome="complete")
    assert root.parent_id == caller.span_id and not any(span.is_error for span in spans)
    assert {span.service for span in spans} == {"stagemesh-head", "stagemesh-replica"}
    for stage in ("writer", "painter"):
        (task,) = of(spans, f"task {stage}", stage=stage, attempt=1)
        (visit,) = of(spans, f"stage {stage}", stage=stage)
        assert visit.resource["stagemesh.stage"] == stage
        assert visit.resource["stagemesh.replica"] == task.attributes["stagemesh.replica"]
        # One clock here: what is inside lies inside.
        assert root.begin_ns <= task.begin_ns <= visit.begin_ns and visit.end_ns <= task.end_ns
    (transfer,) = of(spans, "transfer", source="writer")
    assert transfer.attributes["stagemesh.bytes"] > 4 * 4
    (prefill,), (decode,) = of(spans, "prefill"), of(spans, "decode")
    assert abs(prefill.end_ns - decode.begin_ns) < 1e6
    assert prefill.end_ns - prefill.begin_ns >= 40e6, "the first token takes 50 ms"


def test_spans_of_a_companion_have_their_stages_names_and_say_whose_they_are(
    mesh: stagemesh.Mesh, collector: TraceCollector
) -> None:
    caller = Caller()
    list(mesh.generate("with companion", trace_headers=caller.headers, timeout=30))
    spans = collector.trace(caller.trace_id, *WHOLE, "pick writer", "task writer", "stage writer")
    for name in ("pick writer", "task writer"):
        told = [span.attributes.get("stagemesh.companion") for span in of(spans, name, stage="writer")]
        assert sorted(told, key=str) == ["-negative", None]
    (visit,) = of(spans, "stage writer", companion_role="negative")
    (task,) = of(spans, "task writer", companion="-negative")
    assert visit.parent_id == task.span_id
    sources = [span.attributes["stagemesh.source"] for span in of(spans, "transfer")]
    assert sources == ["writer", "writer"]


def test_the_span_of_a_failed_request_says_why(mesh: stagemesh.Mesh, collector: TraceCollector) -> None:
    caller = Caller()
    with pytest.raises(stagemesh.StageFailed):
        list(mesh.generate("a forbidden wish", trace_headers=caller.headers, timeout=30))
    spans = collector.trace(caller.trace_id, "request", "task writer", "stage writer", "engine")
    for name in ("request", "task writer", "stage writer", "engine"):
        (span,) = of(spans, name, reason="STAGE_FAILED", **{"error.stage": "writer"})
        assert span.is_error and "forbidden" in span.message
    assert not of(spans, "pick painter")


def test_a_request_that_is_refused_has_a_span_too(mesh: stagemesh.Mesh, collector: TraceCollector) -> None:
    caller = Caller()
    with pytest.raises(stagemesh.InvalidRequest):
        list(mesh.generate("", trace_headers=caller.headers, timeout=30))
    (span,) = collector.trace(caller.trace_id, "request")
    assert span.is_error and span.attributes["stagemesh.reason"] == "INVALID_REQUEST"


def test_a_wait_in_the_replica_is_a_span_of_its_own(mesh: stagemesh.Mesh, collector: TraceCollector) -> None:
    callers = [Caller() for _ in range(4)]
    streams = [
        mesh.generate("a wish", trace_headers=caller.headers, outputs="writer", timeout=30) for caller in callers
    ]
    for stream in streams:
        next(stream)  # two replicas, one slot each: the last two wait
    for stream in streams:
        list(stream)
    traces = [collector.trace(caller.trace_id, "request", "stage writer", "engine") for caller in callers]
    waits = [span for spans in traces for span in of(spans, "queue")]
    assert waits and all(span.end_ns > span.begin_ns for span in waits)


def test_a_client_that_leaves_is_seen_in_head_and_replica(mesh: stagemesh.Mesh, collector: TraceCollector) -> None:
    caller = Caller()
    stream = mesh.generate(
        "a wish", trace_headers=caller.headers, sampling={"writer": {"max_tokens": 5000}}, timeout=30
    )
    next(stream)
    stream.close()
    spans = collector.trace(caller.trace_id, "request", "task writer", "stage writer", "engine")
    assert of(spans, "request", outcome="left") and not any(span.is_error for span in spans)
    assert of(spans, "stage writer", aborted=True) and of(spans, "task writer", aborted=True)


def test_a_request_without_headers_begins_a_trace_and_one_that_is_not_sampled_leaves_none(
    mesh: stagemesh.Mesh, collector: TraceCollector
) -> None:
    quiet = Caller()
    headers = {"traceparent": quiet.headers["traceparent"].removesuffix("01") + "00"}
    list(mesh.generate("a wish", trace_headers=headers, timeout=30))
    list(mesh.generate("a wish", request_id="alone", timeout=30))
    caller = Caller()
    list(mesh.generate("a wish", trace_headers=caller.headers, timeout=30))
    collector.trace(caller.trace_id, *WHOLE)
    (root,) = of(collector.spans, "request", request_id="alone")
    assert root.parent_id == ""
    assert {span.name for span in collector.trace(root.trace_id, *WHOLE)} == set(WHOLE)
    assert not [span for span in collector.spans if span.trace_id == quiet.trace_id]


def test_a_program_that_traces_gets_a_span_for_its_request(mesh: stagemesh.Mesh, collector: TraceCollector) -> None:
    program = """
import asyncio, sys
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from stagemesh import AsyncClient, Client

trace.set_tracer_provider(provider := TracerProvider())
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(sys.argv[2], insecure=True)))

async def ask():
    async with AsyncClient(sys.argv[1]) as client:
        async for _ in client.generate("a wish"):
            pass

with trace.get_tracer("program").start_as_current_span("its own work") as span:
    with Client(sys.argv[1]) as client:
        list(client.generate("a wish"))
    asyncio.run(ask())
    print(format(span.get_span_context().trace_id, "032x"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, mesh.address, collector.address],
        capture_output=True, text=True, timeout=60, env={**os.environ, "OTEL_SERVICE_NAME": "program"}, check=True,
    )  # fmt: skip
    spans = collector.trace(done.stdout.strip(), "its own work", "stagemesh.generate", "stagemesh.generate", *WHOLE * 2)
    own, asked = of(spans, "its own work")[0], of(spans, "stagemesh.generate")
    assert [span.parent_id for span in asked] == [own.span_id] * 2
    assert {span.service for span in [own, *asked]} == {"program"}
    assert {span.parent_id for span in of(spans, "request")} == {span.span_id for span in asked}


def test_after_a_loss_a_second_task_span_shows_where_it_went_on(
    mesh: stagemesh.Mesh, collector: TraceCollector
) -> None:
    """Last in this file: it costs a replica."""
    caller = Caller()
    with Client(mesh.address) as client, AdminClient(mesh.address) as admin:
        sampling = {"writer": {"max_tokens": 40, "temperature": 0}}
        stream = client.generate("a wish", sampling=sampling, trace_headers=caller.headers, timeout=60)
        first = next(stream)
        assert isinstance(first, TextDelta)
        pids = {row.report.replica.replica_id: row.report.pid for row in admin.list_replicas(stage="writer")[0]}
        os.kill(pids[first.replica_id], signal.SIGKILL)
        assert isinstance(list(stream)[-1], Finished)
    spans = collector.trace(caller.trace_id, "request", "task writer", "task writer", "stage writer")
    lost, survived = of(spans, "task writer")
    assert lost.is_error and lost.attributes["stagemesh.reason"] == "REPLICA_LOST"
    assert lost.attributes["stagemesh.replica"] == first.replica_id != survived.attributes["stagemesh.replica"]
    assert survived.attributes["stagemesh.attempt"] == 2 and survived.attributes["stagemesh.resumed_tokens"] >= 1
    assert not of(spans, "request")[0].is_error
    (visit,) = of(spans, "stage writer")  # the killed one could not tell its part
    assert visit.parent_id == survived.span_id


def test_traces_that_cannot_be_had_are_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "sketch.yaml"
    path.write_text(PIPELINE)
    code = "import sys; sys.modules['opentelemetry.sdk.trace'] = None; from stagemesh.cli.main import run; run()"
    for command in (["head", str(path), "--listen", "127.0.0.1:0"], ["worker", "--head", "127.0.0.1:1"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *command, "--otlp-endpoint", "127.0.0.1:4317"],
            capture_output=True, text=True, timeout=60, env={**os.environ, "TYPER_USE_RICH": "0"},
        )  # fmt: skip
        assert done.returncode != 0
        assert "pip install 'stagemesh[telemetry]'" in done.stderr and "Traceback" not in done.stderr

"""Metrics of a real head under real requests; and every metric that the dashboard and the alerts name exists."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import stagemesh
from stagemesh import Client

OBSERVABILITY = Path(__file__).resolve().parents[2] / "deploy/observability"
PIPELINE = """
name: sketch
stages:
- {name: writer, engine: synthetic, final_output: true, engine_args: {tokens: 8}, runtime: {shared_devices: true}}
- {name: painter, stage_type: diffusion, engine: synthetic, engine_args: {steps: 4}}
"""


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list]]:
    path = tmp_path_factory.mktemp("metrics") / "sketch.yaml"
    path.write_text(PIPELINE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with stagemesh.Mesh(path, head_arguments=["--metrics-listen", address]) as mesh, Client(mesh.address) as client:
        for _ in range(3):
            list(client.generate("a wish", timeout=30))
        with pytest.raises(stagemesh.InvalidRequest):
            list(client.generate("", timeout=30))
        frames = client.generate("a wish", sampling={"writer": {"max_tokens": 8}}, timeout=30)
        next(iter(frames))
        frames.close()
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    yield {family.name: family.samples for family in text_string_to_metric_families(text)}


def value(samples: list, **labels: str) -> float:
    return sum(s.value for s in samples if all(s.labels.get(k) == v for k, v in labels.items()))


def test_requests_are_counted_by_outcome(scraped: dict[str, list]) -> None:
    totals = [s for s in scraped["stagemesh_requests"] if s.name.endswith("_total")]
    assert value(totals, outcome="complete") >= 3
    assert value(totals) <= 4, "a request that was refused is none that ended"


def test_work_is_counted_by_stage(scraped: dict[str, list]) -> None:
    tokens = [s for s in scraped["stagemesh_generation_tokens"] if s.name.endswith("_total")]
    steps = [s for s in scraped["stagemesh_diffusion_steps"] if s.name.endswith("_total")]
    assert value(tokens, stage="writer") >= 24
    assert value(steps, stage="painter") >= 12


def test_latencies_have_as_many_observations_as_tasks(scraped: dict[str, list]) -> None:
    for name in ("stagemesh_queue_seconds", "stagemesh_stage_seconds", "stagemesh_first_output_seconds"):
        counts = [s for s in scraped[name] if s.name.endswith("_count")]
        assert value(counts, stage="painter") >= 3, name


def test_membership_shows(scraped: dict[str, list]) -> None:
    assert value(scraped["stagemesh_nodes"], state="live") == 1
    assert value(scraped["stagemesh_replicas"], state="ready") == 2
    assert value(scraped["stagemesh_stage_ready_replicas"], stage="writer") == 1
    assert value([s for s in scraped["stagemesh_events"] if s.name.endswith("_total")]) > 0


@pytest.mark.parametrize("file", ["grafana-dashboard.json", "alerts.yaml"])
def test_every_metric_that_is_named_exists(scraped: dict[str, list], file: str) -> None:
    sampled = {sample.name for samples in scraped.values() for sample in samples} | set(scraped)
    # Counters that have not moved yet have no sample, but their family is there.
    known = sampled | {f"{name}_total" for name in scraped} | {f"{name}_bucket" for name in scraped}
    named = set(re.findall(r"stagemesh_[a-z_]+", (OBSERVABILITY / file).read_text()))
    assert len(named) > 5
    assert named <= known, sorted(named - known)

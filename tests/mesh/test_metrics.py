"""Metrics of a real head under real requests; every metric that the dashboard, alerts and page name exists."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import stagemesh
from stagemesh import Client, Finished, Frame, Image, StageFinished, TextDelta
from stagemesh.client.admin import AdminClient
from tests.mesh.metrics_reader import Scrape, free_address
from tests.mesh.processes import eventually

ROOT = Path(__file__).resolve().parents[2]
NAMING = ("deploy/observability/grafana-dashboard.json", "deploy/observability/alerts.yaml",
          "docs/operations/observability.md")  # fmt: skip
PIPELINE = """
name: sketch
limits: {max_inflight: 1, max_waiting: 0}
routing: {policy: round-robin}
stages:
- name: writer
  engine: synthetic
  final_output: true
  engine_args: {tokens: 8, tokens_per_second: 80}
  runtime: {num_replicas: 2, shared_devices: true}
- name: painter
  stage_type: diffusion
  engine: synthetic
  engine_args: {steps: 4, image_size: 32}
  runtime: {shared_devices: true}
"""
LONG = {"writer": {"max_tokens": 400, "ignore_eos": True}}
RESUMED = {"writer": {"max_tokens": 40, "ignore_eos": True, "temperature": 0}}
WRITER, PAINTER = {"pipeline": "sketch", "stage": "writer"}, {"pipeline": "sketch", "stage": "painter"}
EDGE = {"pipeline": "sketch", "source": "writer", "stage": "painter"}


@dataclass
class Seen:
    """What the clients saw, and what the head counted of it."""

    address: str
    mesh: str
    frames: list[Frame] = field(default_factory=list)
    scrape: Scrape | None = None

    def of(self, kind: type[Frame], stage: str = "") -> list:
        return [frame for frame in self.frames if isinstance(frame, kind) and stage in ("", frame.stage)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Three requests, one that is wrong, one that is refused, one aborted, and one whose replica is killed."""
    path = tmp_path_factory.mktemp("metrics") / "sketch.yaml"
    path.write_text(PIPELINE)
    address = free_address()
    with stagemesh.Mesh(path, head_arguments=["--metrics-listen", address]) as mesh:
        result = Seen(address, mesh.address)
        with Client(mesh.address, max_retries=0) as client, AdminClient(mesh.address) as admin:
            for _ in range(3):
                result.frames += client.generate("a wish", timeout=30)
            with pytest.raises(stagemesh.InvalidRequest):
                list(client.generate("", timeout=30))
            long = client.generate("a wish", sampling=LONG, request_id="long", timeout=30)
            result.frames.append(next(long))
            with pytest.raises(stagemesh.Overloaded):
                list(client.generate("a wish", timeout=30))
            client.abort("long")
            result.frames += long
            stream = client.generate("a wish", sampling=RESUMED, timeout=30)
            first = next(stream)
            assert isinstance(first, TextDelta)
            pids = {row.report.replica.replica_id: row.report.pid for row in admin.list_replicas(stage="writer")[0]}
            os.kill(pids[first.replica_id], signal.SIGKILL)
            result.frames += [first, *stream]
        eventually("the killed replica is back", lambda: Scrape(address).value("link_reconnects_total") == 1, 30)
        result.scrape = Scrape(address)
        yield result


@pytest.fixture
def scrape(seen: Seen) -> Scrape:
    assert seen.scrape is not None
    return seen.scrape


def test_requests_are_counted_by_outcome(scrape: Scrape) -> None:
    assert scrape.value("requests_total", pipeline="sketch", outcome="complete") == 4
    assert scrape.value("requests_total", pipeline="sketch", outcome="abort") == 1
    assert scrape.value("requests_total") == 5, "a request that was refused is none that ended"
    assert scrape.value("request_seconds_count") == 5
    assert scrape.value("admission_refusals_total", pipeline="sketch") == 1
    assert scrape.value("requests_running") == scrape.value("requests_waiting") == 0


def test_work_is_counted_by_stage(scrape: Scrape, seen: Seen) -> None:
    made = sum(frame.usage.completion_tokens for frame in seen.of(StageFinished, "writer"))
    assert made > 3 * 8 + 40
    assert scrape.value("generation_tokens_total", **WRITER) == made
    assert scrape.value("diffusion_steps_total", **PAINTER) == 4 * 4
    assert scrape.value("images_total", **PAINTER) == 4


def test_sizes_have_buckets_of_their_own_unit(scrape: Scrape, seen: Seen) -> None:
    images = seen.of(Image)
    assert len(images) == 4
    assert scrape.value("output_bytes_sum", **PAINTER) == sum(len(image.data) for image in images)
    assert scrape.value("image_pixels_sum", **PAINTER) == 4 * 32 * 32
    assert scrape.value("image_pixels_bucket", **PAINTER, le="4096.0") == 4
    assert scrape.value("task_diffusion_steps_bucket", **PAINTER, le="4.0") == 4
    assert scrape.value("task_diffusion_steps_bucket", **PAINTER, le="2.0") == 0


def test_an_edge_has_time_and_bytes(scrape: Scrape, seen: Seen) -> None:
    moved = [transfer for end in seen.of(Finished) if "painter" in end.stages
             for transfer in end.stages["painter"].transfers]  # fmt: skip
    assert [transfer.source for transfer in moved] == ["writer"] * 4
    assert all(transfer.size_bytes > 8 for transfer in moved)
    assert scrape.value("transfer_bytes_sum", **EDGE) == sum(transfer.size_bytes for transfer in moved)
    assert scrape.value("transfer_seconds_sum", **EDGE) == pytest.approx(sum(one.duration_s for one in moved))
    assert scrape.value("transfer_seconds_count") == scrape.value("transfer_bytes_count") == 4


def test_times_are_observed_once_a_task(scrape: Scrape) -> None:
    for name in ("queue_seconds", "stage_seconds"):
        assert scrape.value(f"{name}_count", **WRITER) == 5, name
        assert scrape.value(f"{name}_count", **PAINTER) == 4, name
    assert scrape.value("first_output_seconds_count", **WRITER, modality="text") == 5
    assert scrape.value("first_output_seconds_count", **PAINTER, modality="image") == 4


def test_replicas_have_their_own_times(scrape: Scrape) -> None:
    assert scrape.value("engine_queue_seconds_count", **WRITER) == 5
    rows = scrape.rows("generation_seconds_count", **WRITER)
    assert {row.labels["replica"] for row in rows} == {"0", "1"}
    assert sum(row.value for row in rows) == 4, "the aborted one made nothing whole"
    assert scrape.value("generation_seconds_sum", **WRITER) > 3 * 7 / 80
    assert scrape.value("generation_seconds_count", **PAINTER, replica="0") == 4


def test_an_abort_is_timed(scrape: Scrape) -> None:
    assert scrape.value("abort_seconds_count", **WRITER) == 1
    assert 0 < scrape.value("abort_seconds_sum", **WRITER) < 2
    assert scrape.value("abort_seconds_count") == 1


def test_a_loss_shows_as_retry_recovery_and_reconnect(scrape: Scrape, seen: Seen) -> None:
    (end,) = [frame for frame in seen.of(StageFinished, "writer") if frame.recovery]
    assert scrape.value("task_retries_total", **WRITER) == scrape.value("task_retries_total") == 1
    assert scrape.value("recoveries_total", **WRITER, mode=end.recovery) == scrape.value("recoveries_total") == 1
    assert scrape.value("link_reconnects_total", **WRITER, replica=str(end.replicas[0])) == 1
    assert scrape.value("link_reconnects_total") == 1


def test_picks_are_counted_by_policy(scrape: Scrape) -> None:
    assert scrape.value("picks_total", **WRITER, policy="round-robin") == 6
    assert scrape.value("picks_total", **PAINTER, policy="round-robin") == 4
    assert scrape.value("picks_total") == 10


def test_membership_shows(scrape: Scrape) -> None:
    assert scrape.value("nodes", state="live") == 1
    assert 0 <= scrape.value("lease_age_seconds") < 5 and len(scrape.rows("lease_age_seconds")) == 1
    assert scrape.value("replicas", state="ready") == 3
    assert scrape.value("stage_ready_replicas", **WRITER) == 2
    assert scrape.value("events_total") > 0
    assert 0 <= scrape.value("event_loop_lag_seconds") < 5


@pytest.mark.parametrize("file", NAMING)
def test_every_metric_that_is_named_exists(scrape: Scrape, file: str) -> None:
    # Counters that have not moved yet have no sample, but their family is there.
    known = scrape.names | {f"{name}_{end}" for name in scrape.families for end in ("total", "bucket", "sum")}
    named = set(re.findall(r"stagemesh_[a-z_]+", (ROOT / file).read_text()))
    assert len(named) > 5
    assert named <= known, sorted(named - known)


def test_the_page_lists_every_metric(scrape: Scrape) -> None:
    page = (ROOT / "docs/operations/observability.md").read_text()
    ours = {name for name in scrape.families if name.startswith("stagemesh_") and not name.endswith("_created")}
    missing = [name for name in sorted(ours) if not re.search(rf"{name}(_total)?\b", page)]
    assert not missing


def test_a_slot_that_is_gone_takes_its_series_along(seen: Seen) -> None:
    """Last in this file: it costs a replica."""
    with AdminClient(seen.mesh) as admin:
        admin.scale_stage("writer", 1)

    def left(name: str) -> int:
        return len(Scrape(seen.address).rows(name, **WRITER))

    for name in ("generation_seconds_count", "engine_queue_seconds_count", "link_reconnects_total",
                 "replica_running_tasks"):  # fmt: skip
        eventually(f"{name} has one series", lambda name=name: left(name) == 1, 20)
    assert Scrape(seen.address).value("generation_tokens_total", **WRITER) > 0, "what was made stays counted"

"""Real processes, hurt on purpose: what the mesh notices, and what its clients see."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from tests.mesh.faults.load import Load, text_of
from tests.mesh.faults.processes import Processes, eventually, processes

READY = replica_pb.REPLICA_STATE_READY
PIPELINE = """
name: sketch
stages:
  - name: writer
    stage_type: llm
    engine: synthetic
    engine_args: {tokens: 40, tokens_per_second: 40}
    runtime: {num_replicas: %d}
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Processes]:
    """Two writer replicas wanted; nothing started."""
    with processes(tmp_path, PIPELINE % 2) as mesh:
        yield mesh


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Processes]:
    with processes(tmp_path, PIPELINE % 1) as mesh:
        yield mesh


def test_workers_may_start_before_the_head(one: Processes) -> None:
    head = one.start_head()
    head.kill()
    worker = one.start_worker("a")
    eventually("it notices that there is no head", lambda: "no session with the head" in worker.output)
    one.start_head()
    one.ready(1)
    assert text_of(one)


def test_killed_replica_is_restarted_in_its_slot_and_no_request_fails(two: Processes) -> None:
    two.start_head()
    two.start_worker("a")
    before = {row.report.replica.replica_id: row.report for row in two.ready(2)}
    with Load(two) as load:
        eventually("load runs", lambda: load.done > 2)
        os.kill(before[0].pid, signal.SIGKILL)
        eventually(
            "it is ready again with a new incarnation",
            lambda: [
                row for row in two.replicas()
                if row.state == READY and row.report.replica.replica_id == 0 and row.report.pid != before[0].pid
            ],
        )  # fmt: skip
        seen = load.done
        eventually("load goes on", lambda: load.done > seen + 3)
    assert load.failures == []
    after = {row.report.replica.replica_id: row.report for row in two.ready(2)}
    assert after[0].replica.incarnation != before[0].replica.incarnation
    assert after[0].device_ids == before[0].device_ids and after[0].restarts == 1
    assert after[1].pid == before[1].pid


def test_killed_node_agent_leaves_no_process_and_its_successor_gets_the_same_slot(one: Processes) -> None:
    one.start_head()
    worker = one.start_worker("a")
    replica = one.ready(1)[0].report
    worker.kill()
    started = time.monotonic()
    eventually("the head sees the break at once", lambda: one.nodes()["a"].state != admin_pb.NODE_STATE_LIVE, 2)
    assert time.monotonic() - started < 2
    eventually("its replica ends", lambda: all(p.pid != replica.pid for p in one.survivors()), 15)
    one.start_worker("a")
    again = eventually("a new one is ready", lambda: [r for r in one.ready(1) if r.report.pid != replica.pid])[0]
    assert again.report.replica.replica_id == replica.replica.replica_id
    assert again.report.device_ids == replica.device_ids
    assert text_of(one)
    assert text_of(one), "the second request after a restart works like the first"


def test_stopped_node_agent_loses_its_lease_and_comes_back_with_its_replica(one: Processes) -> None:
    one.start_head("--heartbeat-interval", "0.5", "--heartbeat-timeout", "3")
    worker = one.start_worker("a")
    before = one.ready(1)[0].report
    worker.signal(signal.SIGSTOP)
    eventually("its lease is over", lambda: one.nodes()["a"].state == admin_pb.NODE_STATE_GONE, 10)
    worker.signal(signal.SIGCONT)
    after = one.ready(1)[0].report
    assert (after.pid, after.replica.incarnation) == (before.pid, before.replica.incarnation), "no model loads twice"
    assert text_of(one)
    assert "stood still for" in worker.output


def test_restarted_head_gets_its_replicas_back_without_a_reload(two: Processes) -> None:
    head = two.start_head()
    two.start_worker("a")
    before = {row.report.replica.replica_id: row.report for row in two.ready(2)}
    expected = text_of(two)
    for _ in range(3):
        head.kill()
        head = two.start_head()
        after = {row.report.replica.replica_id: row.report for row in two.ready(2)}
        for replica_id, report in before.items():
            assert after[replica_id].pid == report.pid, "the process lives on"
            assert after[replica_id].replica.incarnation == report.replica.incarnation
            assert after[replica_id].device_ids == report.device_ids
        assert text_of(two) == expected


def test_sigterm_drains_a_node_and_the_head_knows_at_once(one: Processes) -> None:
    one.start_head()
    worker = one.start_worker("a")
    one.ready(1)
    texts: list[str] = []
    request = threading.Thread(target=lambda: texts.append(text_of(one)))
    request.start()
    eventually("it runs", lambda: [r for r in one.replicas() if r.inflight])
    worker.signal(signal.SIGTERM)
    request.join(30)
    assert texts and len(texts[0].split()) == 40, "the running request had its time"
    assert worker.wait() == 0
    started = time.monotonic()
    eventually("it is gone", lambda: not [r for r in one.replicas() if r.state == READY], 2)
    assert time.monotonic() - started < 2
    assert one.survivors() == [p for p in one.survivors() if "stagemesh_head" in " ".join(p.cmdline())]
    assert one.litter() == []


def test_second_sigterm_stops_at_once(one: Processes) -> None:
    one.start_head()
    worker = one.start_worker("a")
    one.ready(1)
    with one.client as client:
        frames = client.generate("a wish", sampling={"writer": {"max_tokens": 4000, "ignore_eos": True}}, timeout=60)
        next(iter(frames))
        worker.signal(signal.SIGTERM)
        eventually("it drains", lambda: "draining" in worker.output)
        worker.signal(signal.SIGTERM)
        assert worker.wait(15) == 0
        frames.close()


def test_crash_loop_ends_in_failed_with_the_engines_last_lines(tmp_path: Path) -> None:
    pipeline = PIPELINE % 1 + "    default_sampling_params: {}\n"
    pipeline = pipeline.replace("{tokens: 40, tokens_per_second: 40}", "{crash_on_start: no weights here}")
    with processes(tmp_path, pipeline) as mesh:
        mesh.start_head()
        mesh.start_worker("a")
        row = eventually(
            "it is given up",
            lambda: [r for r in mesh.replicas() if r.state == replica_pb.REPLICA_STATE_FAILED],
        )[0]
        assert row.report.restarts == 2, "three starts failed"
        assert "no weights here" in row.report.error.message


def test_wrong_engine_option_fails_at_once_with_a_suggestion(tmp_path: Path) -> None:
    pipeline = (PIPELINE % 1).replace("tokens_per_second", "token_per_second")
    with processes(tmp_path, pipeline) as mesh:
        mesh.start_head()
        mesh.start_worker("a")
        row = eventually(
            "it is given up",
            lambda: [r for r in mesh.replicas() if r.state == replica_pb.REPLICA_STATE_FAILED],
        )[0]
        assert row.report.restarts == 0
        assert "did you mean tokens_per_second?" in row.report.error.message
        assert "writer" in row.report.error.message

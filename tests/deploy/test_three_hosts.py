"""A mesh on three hosts, and a client on a fourth: real addresses, real cuts of the cable."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh import Diffusion, Image, TextDelta
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from tests.deploy.load import Load, finish
from tests.deploy.three_hosts import SUBNET, HostProcesses, hosts, timed, why_not
from tests.mesh.faults.processes import Process, eventually

SUSPECT = replica_pb.REPLICA_STATE_SUSPECT
REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=f"three hosts: {REASON}")]
SEED = {"painter": Diffusion(seed=7)}
"""Sampling with which every replica makes the same picture of the same text."""
BEATS = ("--heartbeat-interval", "0.3", "--heartbeat-timeout", "4")
SKETCH = """
name: sketch
stages:
  - name: writer
    stage_type: llm
    engine: synthetic
    engine_args: {tokens: 40, tokens_per_second: 40}
    final_output: true
    final_output_type: text
  - name: painter
    stage_type: diffusion
    engine: synthetic
    engine_args: {image_size: 96, steps: 4}
    final_output_type: image
"""
TENSOR_BYTES = 1024 * 512 * 4
HIDDEN_STATES = """
name: sketch
stages:
  - name: writer
    stage_type: llm
    engine: synthetic
    engine_args: {output: tensor, tensor_shape: [1024, 512]}
  - name: painter
    stage_type: diffusion
    engine: synthetic
    engine_args: {image_size: 96, steps: 4}
    final_output_type: image
"""


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[HostProcesses]:
    """Hosts for the sketch pipeline; nothing started."""
    with hosts(tmp_path, SKETCH) as made:
        yield made


def start(mesh: HostProcesses) -> tuple[Process, Process, Process]:
    """Head, writer and painter, each on its host; returns when both stages are ready."""
    started = (
        mesh.head_on("head", *BEATS),
        mesh.worker_on("writer", "writer-0", "writer"),
        mesh.worker_on("painter", "painter-0", "painter"),
    )
    mesh.ready(2)
    return started


def sketch(mesh: HostProcesses, prompt: str = "a wish") -> tuple[str, bytes]:
    with mesh.client as client:
        frames = list(client.generate(prompt, sampling=SEED, timeout=60))
    text = "".join(frame.text for frame in frames if isinstance(frame, TextDelta))
    return text, b"".join(frame.data for frame in frames if isinstance(frame, Image))


def received(mesh: HostProcesses, host: str) -> int:
    """Bytes that came in over the host's cable so far."""
    command = ["ip", "-n", mesh.network.space(host), "-s", "-j", "link", "show", "eth0"]
    return int(json.loads(subprocess.check_output(command, timeout=10))[0]["stats64"]["rx"]["bytes"])


def test_request_runs_across_three_hosts_that_know_each_other_by_name(mesh: HostProcesses, tmp_path: Path) -> None:
    with timed("head and two nodes, until both stages are ready"):
        start(mesh)
    endpoints = {row.report.endpoint.rpartition(":")[0] for row in mesh.replicas()}
    assert endpoints == {f"{SUBNET}.2", f"{SUBNET}.3"}, "each node told the address of its route to the head"
    assert len({row.node_id for row in mesh.replicas()}) == 2
    with timed("a sketch request (a second of it is the writer's 40 tokens)"):
        text, picture = sketch(mesh)
    assert len(text.split()) == 40 and picture.startswith(b"\x89PNG")
    arguments = ["generate", "a wish", "--head", "head:8470", "--out", str(tmp_path / "out"), "-s", "painter.seed=7"]
    command = mesh.start_on("client", "stagemesh.cli.main", *arguments)
    assert command.wait(60) == 0, command.output
    saved = list((tmp_path / "out").glob("*.png"))
    assert [path.read_bytes() for path in saved] == [picture], command.output


def test_tensor_goes_from_host_to_host_and_not_through_the_head(tmp_path: Path) -> None:
    with hosts(tmp_path, HIDDEN_STATES) as mesh:
        start(mesh)
        painter, head = received(mesh, "painter"), received(mesh, "head")
        started = time.monotonic()
        _, picture = sketch(mesh)
        print(f"a request with a tensor of {TENSOR_BYTES >> 20} MiB: {time.monotonic() - started:.2f} s")
        assert picture.startswith(b"\x89PNG")
        assert received(mesh, "painter") - painter > TENSOR_BYTES
        assert received(mesh, "head") - head < TENSOR_BYTES // 4
        assert sketch(mesh, "another")[1] != picture, "the picture is made of the tensor"


def test_request_goes_on_after_a_cut_shorter_than_the_lease(mesh: HostProcesses) -> None:
    start(mesh)
    before = {row.report.pid for row in mesh.replicas()}
    expected = sketch(mesh)
    with mesh.client as client:
        frames = client.generate("a wish", sampling=SEED, timeout=60)
        made = [next(frames) for _ in range(3)]
        mesh.network.cut("writer")
        with timed("cut to suspect"):
            eventually("the writer is suspect", lambda: mesh.state("writer") == SUSPECT, 15)
        mesh.network.heal("writer")
        with timed("healed to the request's end"):
            made += list(frames)
    text = "".join(frame.text for frame in made if isinstance(frame, TextDelta))
    assert text == expected[0]
    assert [frame.data for frame in made if isinstance(frame, Image)] == [expected[1]]
    mesh.ready(2)
    assert {row.report.pid for row in mesh.replicas()} == before, "nothing was started anew"


def test_request_goes_on_elsewhere_after_a_cut_longer_than_the_lease(mesh: HostProcesses) -> None:
    start(mesh)
    expected = sketch(mesh)
    mesh.network.add("spare", 5)
    spare = mesh.worker_on("spare", "spare-0", "writer")
    eventually("the spare node has joined", lambda: "spare-0" in mesh.nodes())
    with mesh.client as client:
        frames = client.generate("a wish", sampling=SEED, timeout=60)
        made = [next(frames) for _ in range(3)]
        mesh.network.cut("writer")
        with timed("cut to the request's end on a spare host (the lease is 4 s)"):
            made += list(frames)
    text = "".join(frame.text for frame in made if isinstance(frame, TextDelta))
    assert text == expected[0], "no text is lost or doubled"
    assert not spare.has_ended
    assert {row.node_id for row in mesh.ready(2)} == {"spare-0", "painter-0"}
    mesh.network.heal("writer")
    with timed("healed to joined again"):
        eventually("the cut node is back", lambda: mesh.nodes()["writer-0"].state == admin_pb.NODE_STATE_LIVE)
    assert sketch(mesh) == expected


def test_replica_that_the_head_cannot_reach_is_placed_on_a_spare_host(mesh: HostProcesses) -> None:
    behind_a_firewall = mesh.network.add_address("writer", 52)
    mesh.network.forbid("head", behind_a_firewall)
    mesh.network.add("spare", 5)
    head = mesh.head_on("head", *BEATS, "--link-timeout", "2")
    worker = mesh.worker_on("writer", "writer-0", "writer", "--advertise-host", behind_a_firewall)
    mesh.worker_on("painter", "painter-0", "painter")
    eventually("the node runs it and the head cannot reach it", lambda: mesh.state("writer") == SUSPECT)
    mesh.worker_on("spare", "spare-0", "writer")
    with timed("a spare node's start to the replica's there (the head waits 2 s for its link, then twice as long)"):
        eventually("it is on the spare host", lambda: {row.node_id for row in mesh.replicas("writer")} == {"spare-0"})
        mesh.ready(2)
    assert sketch(mesh)[0]
    assert "though node writer-0 is well" in head.output
    assert "the head cannot reach writer/0" in worker.output


def test_replaced_host_has_a_new_address_and_keeps_its_place(mesh: HostProcesses) -> None:
    _, writer, _ = start(mesh)
    expected = sketch(mesh)
    old = mesh.replicas("writer")[0]
    mesh.network.cut("writer")
    writer.kill()
    mesh.network.add("writer-anew", 22)
    with timed("new host's start to ready (the old one was cut off without a word)"):
        mesh.worker_on("writer-anew", "writer-0", "writer")
        new = eventually(
            "the slot is filled from the new address",
            lambda: next(
                (row for row in mesh.replicas("writer") if row.report.endpoint.startswith(f"{SUBNET}.22:")), None
            ),
        )
        mesh.ready(2)
    assert (new.node_id, new.report.replica.replica_id) == (old.node_id, old.report.replica.replica_id)
    assert new.report.replica.incarnation != old.report.replica.incarnation
    assert sketch(mesh) == expected


def test_all_hosts_are_rolled_under_load_and_no_request_fails(mesh: HostProcesses) -> None:
    head, *workers = start(mesh)
    with Load(mesh.address, sampling=SEED, max_retries=10) as load:
        load.goes_on()
        for worker, host in zip(workers, ("writer", "painter"), strict=True):
            with timed(f"{host}: SIGTERM, drained, its successor ready"):
                finish(worker)
                mesh.worker_on(host, f"{host}-0", host)
                mesh.ready(2)
            load.goes_on()
        with timed("head: SIGTERM, its successor has all nodes back"):
            finish(head)
            mesh.head_on("head", *BEATS)
            mesh.ready(2)
        load.goes_on()
    print(f"{load.done} requests, {len(load.failures)} failed, longest {load.longest_s:.2f} s")
    assert load.failures == []


def test_request_survives_the_head_that_is_killed_and_started_anew(mesh: HostProcesses) -> None:
    head, *_ = start(mesh)
    expected = sketch(mesh)
    with mesh.client as client:
        frames = client.generate("a wish", sampling=SEED, timeout=60)
        made = [next(frames) for _ in range(3)]
        head.kill()
        with timed("head killed to the request's end"):
            mesh.head_on("head", *BEATS)
            made += list(frames)
    text = "".join(frame.text for frame in made if isinstance(frame, TextDelta))
    assert (text, [frame.data for frame in made if isinstance(frame, Image)]) == (expected[0], [expected[1]])

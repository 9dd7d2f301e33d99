"""The life of a StatefulSet, played with processes: stable ordinals, replaced pods, scaling, a rolling update."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh.client.admin import AdminClient
from stagemesh.v1 import replica_pb2 as replica_pb
from tests.deploy.load import Load, finish
from tests.deploy.on_host import POD
from tests.mesh.faults.processes import Process, Processes, eventually

READY = replica_pb.REPLICA_STATE_READY
PIPELINE = """
name: sketch
stages:
  - name: writer
    stage_type: llm
    engine: synthetic
    engine_args: {tokens: 20, tokens_per_second: 40}
    runtime: {num_replicas: 3}
"""


def why_not() -> str:
    """Why a process cannot have a /dev/shm of its own here; empty when it can."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "shm", "/dev/shm"]
    if shutil.which("unshare") is None:
        return "no `unshare` command (util-linux)"
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stderr.strip()


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=f"pods: {why_not()}")]


class Pods(Processes):
    """Processes of which each may have an environment of its own."""

    def start_pod(self, command: list[str], own: dict[str, str]) -> Process:
        process = Process(command, self.environment | own)
        self._started.append(process)
        return process


class StatefulSet:
    """Pods `writer-0`, `writer-1`, ...: one node with one replica each, ended by SIGTERM as by a kubelet."""

    def __init__(self, mesh: Pods) -> None:
        self.mesh = mesh
        self.pods: list[Process] = []

    def start(self, ordinal: int) -> Process:
        own = {"STAGEMESH_LOCK_DIR": str(self.mesh.folder / f"locks-{ordinal}")}
        command = ["tests.deploy.on_host", POD, "stagemesh_worker", "--head", self.mesh.address]
        command += ["--node-id", f"writer-{ordinal}", "--stage", "writer", "--replicas", "1"]
        return self.mesh.start_pod(command, own)

    def scale(self, replicas: int) -> None:
        """As the controller does: new ordinals on top, the highest end first."""
        while len(self.pods) > replicas:
            finish(self.pods.pop())
        while len(self.pods) < replicas:
            self.pods.append(self.start(len(self.pods)))

    def replace(self, ordinal: int) -> None:
        """A pod is deleted, and comes back under its name when it is gone."""
        finish(self.pods[ordinal])
        self.pods[ordinal] = self.start(ordinal)

    def where(self) -> dict[str, str]:
        """Node id -> incarnation of the replica that is ready there."""
        rows = self.mesh.replicas("writer")
        return {row.node_id: row.report.replica.incarnation for row in rows if row.state == READY}

    def wait(self, *ordinals: int) -> dict[str, str]:
        """Until exactly these pods have a ready replica."""
        wanted = {f"writer-{ordinal}" for ordinal in ordinals}
        eventually(f"ready on {sorted(wanted)}", lambda: set(self.where()) == wanted)
        return self.where()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[StatefulSet]:
    """Three pods that are ready."""
    path = tmp_path / "pipeline.yaml"
    path.write_text(PIPELINE)
    with contextlib.closing(Pods(tmp_path, path)) as mesh:
        mesh.start_head()
        made = StatefulSet(mesh)
        made.scale(3)
        mesh.ready(3)
        made.wait(0, 1, 2)
        yield made


def test_replaced_pod_comes_back_under_its_name_and_no_request_fails(pods: StatefulSet) -> None:
    before = pods.where()
    with Load(pods.mesh.address) as load:
        load.goes_on()
        pods.replace(1)
        after = pods.wait(0, 1, 2)
        load.goes_on()
    assert load.failures == []
    assert {node for node in before if before[node] != after[node]} == {"writer-1"}


def test_scaling_down_and_up_fails_no_request(pods: StatefulSet) -> None:
    before = pods.where()
    with Load(pods.mesh.address) as load, AdminClient(pods.mesh.address) as admin:
        load.goes_on()
        # What an autoscaler changes are the pods; the head is told how many are meant, so that none counts as missing.
        admin.scale_stage("writer", 1)
        pods.scale(1)
        assert pods.mesh.missing() == []
        load.goes_on()
        admin.scale_stage("writer", 3)
        pods.scale(3)
        pods.wait(0, 1, 2)
        load.goes_on()
    assert load.failures == []
    assert set(before) == {"writer-0", "writer-1", "writer-2"}


def test_pods_scaled_without_a_word_to_the_head_fail_no_request(pods: StatefulSet) -> None:
    first = pods.where()["writer-0"]
    with Load(pods.mesh.address) as load:
        load.goes_on()
        pods.scale(1)
        assert pods.wait(0) == {"writer-0": first}
        load.goes_on()
        pods.scale(3)
        pods.wait(0, 1, 2)
        load.goes_on()
    assert load.failures == []
    assert pods.where()["writer-0"] == first, "the pod that stayed was left alone"


def test_rolling_update_replaces_all_from_the_highest_down_and_no_request_fails(pods: StatefulSet) -> None:
    before = pods.where()
    with Load(pods.mesh.address) as load:
        for ordinal in (2, 1, 0):
            pods.replace(ordinal)
            pods.wait(0, 1, 2)  # the controller waits for readiness before it takes the next
            load.goes_on()
    after = pods.where()
    print(f"{load.done} requests, {len(load.failures)} failed, longest {load.longest_s:.2f} s")
    assert load.failures == []
    assert not {before[node] for node in before} & {after[node] for node in after}

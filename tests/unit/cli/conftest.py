"""The command, run in this process against a scripted head that also answers operators."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stagemesh.cli.main import run
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import admin_pb2_grpc as admin_grpc
from stagemesh.v1 import replica_pb2 as replica_pb
from tests.unit.client.scripted_head import Script, ScriptedHead, whole_answer


@dataclass(frozen=True)
class Outcome:
    """How the command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """`command("status", "--head", ...)`: runs it as a terminal would, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["stagemesh", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            run()
            code = 0
        except SystemExit as ending:
            code = int(ending.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run_command


@dataclass
class ScriptedAdmin(admin_grpc.AdminServiceServicer):
    """An operator's view of a mesh with one writer, a painter that starts and one that has no place."""

    orders: list[object] = field(default_factory=list)
    drained_polls: int = 2
    """Looks after a drain until what drains is gone."""

    def ListNodes(self, request, context):  # type: ignore[no-untyped-def]
        node = admin_pb.NodeInfo(
            node_id="local", state=admin_pb.NODE_STATE_LIVE, hostname="box", peer="127.0.0.1:5", incarnation="n1",
            free_device_ids=["cpu:1"], replicas=[replica_pb.ReplicaRef(stage="writer")],
        )  # fmt: skip
        node.devices.add(id="cpu:0")
        node.devices.add(id="cpu:1")
        node.lease_age.FromMilliseconds(300)
        return admin_pb.ListNodesResponse(nodes=[] if self._is_drained() else [node])

    def ListReplicas(self, request, context):  # type: ignore[no-untyped-def]
        answer = admin_pb.ListReplicasResponse()
        row = answer.replicas.add(state=replica_pb.REPLICA_STATE_READY, node_id="local", inflight=1)
        row.report.replica.CopyFrom(replica_pb.ReplicaRef(pipeline="shapes", stage="writer", incarnation="i1"))
        row.report.endpoint = "127.0.0.1:41234"
        row.report.device_ids.append("cpu:0")
        row.report.load.running, row.report.load.engine_steps = 1, 1234
        row.report.load.memory_bytes = 300 << 20
        row = answer.replicas.add(state=replica_pb.REPLICA_STATE_STARTING, node_id="local")
        row.report.replica.CopyFrom(replica_pb.ReplicaRef(pipeline="shapes", stage="painter", incarnation="i2"))
        row.report.phase, row.report.restarts = "loading weights", 1
        slot = answer.missing.add(reason="node local has 0 free devices, 1 is needed")
        slot.replica.CopyFrom(replica_pb.ReplicaRef(pipeline="shapes", stage="painter", replica_id=1))
        if self._is_drained():
            del answer.replicas[0]
        return answer

    def _is_drained(self) -> bool:
        if not self.orders or self.drained_polls:
            self.drained_polls -= bool(self.orders)
            return False
        return True

    def ListRequests(self, request, context):  # type: ignore[no-untyped-def]
        answer = admin_pb.ListRequestsResponse()
        row = answer.requests.add(request_id="r-1", pipeline="shapes")
        row.age.FromMilliseconds(2500)
        row.tasks.add(stage="writer", state="streaming", replica=replica_pb.ReplicaRef(stage="writer"), attempt=2)
        return answer

    def DrainReplica(self, request, context):  # type: ignore[no-untyped-def]
        self.orders.append(request)
        answer = admin_pb.DrainReplicaResponse()
        answer.replica.report.replica.CopyFrom(request.replica)
        answer.replica.report.replica.incarnation = "i1"
        return answer

    def DrainNode(self, request, context):  # type: ignore[no-untyped-def]
        self.orders.append(request)
        return admin_pb.DrainNodeResponse(node=admin_pb.NodeInfo(node_id=request.node_id, incarnation="n1"))

    def ScaleStage(self, request, context):  # type: ignore[no-untyped-def]
        self.orders.append(request)
        answer = admin_pb.ScaleStageResponse(previous_replicas=1, replicas=request.replicas)
        answer.missing.add(reason="no free device").replica.CopyFrom(
            replica_pb.ReplicaRef(stage=request.stage, replica_id=1)
        )
        return answer

    def WatchEvents(self, request, context):  # type: ignore[no-untyped-def]
        event = admin_pb.MeshEvent(
            number=1, type="replica.ready", node_id="local", reason="passed its self-probe",
            from_state="STARTING", to_state="READY", replica=replica_pb.ReplicaRef(stage="writer"),
        )  # fmt: skip
        event.time.FromSeconds(0)
        yield admin_pb.WatchEventsResponse(event=event)
        event.type, event.number = "replica.failed", 2
        yield admin_pb.WatchEventsResponse(event=event)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ScriptedHead]]:
    """Starts a scripted head and makes it the default one. Its `admin` is the operator's side."""
    started: list[ScriptedHead] = []

    def start(*scripts: Script) -> ScriptedHead:
        admin = ScriptedAdmin()
        head = ScriptedHead(*(scripts or (whole_answer,)), admin=admin)
        started.append(head)
        monkeypatch.setenv("STAGEMESH_HEAD", head.address)
        return head

    yield start
    for head in started:
        head.stop()

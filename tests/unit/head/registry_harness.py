"""A registry with a clock of its own, and nodes that are driven by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from stagemesh import __version__
from stagemesh.config import Pipeline, Runtime, Stage
from stagemesh.rpc.errors import MeshError
from stagemesh.v1 import device_pb2 as device_pb
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_head.registry.effects import CloseSession, Effect, Happened, RowChanged, Send
from stagemesh_head.registry.machine import Machine
from stagemesh_head.registry.rows import ReplicaKey, ReplicaRow, ReplicaState
from stagemesh_head.registry.settings import RegistrySettings
from stagemesh_head.registry.state import stage_entries

_incarnations = count(1)


def stage(name: str, replicas: int = 1, *, kind: str = "llm", **more: Any) -> Stage:
    """A stage; keywords that `Runtime` has go there."""
    runtime = {key: more.pop(key) for key in list(more) if key in Runtime.model_fields}
    return Stage(name=name, stage_type=kind, runtime=Runtime(num_replicas=replicas, **runtime), **more)


def pipeline(*stages: Stage, name: str = "shapes") -> Pipeline:
    """A pipeline of these stages."""
    return Pipeline(name=name, stages=stages)


def cores(number: int) -> list[device_pb.Device]:
    """CPU core sets of one core each."""
    kind = device_pb.DEVICE_KIND_CPU
    return [device_pb.Device(id=f"cpu:{i}", kind=kind, cores=[i], physical_id=str(i)) for i in range(number)]


def gpus(*numbers: int) -> list[device_pb.Device]:
    """CUDA devices."""
    kind = device_pb.DEVICE_KIND_CUDA
    return [device_pb.Device(id=f"cuda:{i}", kind=kind, physical_id=str(i)) for i in numbers]


class World:
    """A machine, its clock, and everything it said."""

    def __init__(self, *pipelines: Pipeline, **settings: Any) -> None:
        self.now = 1000.0
        self.pipelines = pipelines
        self.settings = RegistrySettings(**settings)
        self.sessions = count(1)
        self.nodes: list[FakeNode] = []
        self.restart_head()

    def restart_head(self) -> None:
        """A new head with nothing in its memory; the nodes' sessions are broken."""
        self.epoch = f"epoch-{next(_incarnations)}"
        self.machine = Machine(stage_entries(self.pipelines), self.settings, self.epoch, self.now)
        self.rows: dict[ReplicaKey, ReplicaRow] = {}
        self.events: list[Happened] = []
        self.closed: dict[int, MeshError | None] = {}
        self.cut_off: dict[ReplicaKey, float] = {}
        """Since when a row says that only the link of its replica is broken."""
        self.waits: list[tuple[ReplicaKey, float, float]] = []
        """Replicas that were sent away for that: how long it lasted, and when it was."""
        for node in self.nodes:
            node.session = None

    def node(self, node_id: str, devices: Sequence[device_pb.Device] | int = 2, **hello: Any) -> FakeNode:
        """A node that has not joined yet."""
        offered = cores(devices) if isinstance(devices, int) else devices
        node = FakeNode(self, node_id, offered, hello)
        self.nodes.append(node)
        return node

    def do(self, effects: Iterable[Effect]) -> None:
        """Carry out effects: rows here, messages to the nodes."""
        for effect in effects:
            if isinstance(effect, RowChanged):
                self._note_link(effect)
                if effect.row is None:
                    del self.rows[effect.key]
                else:
                    self.rows[effect.key] = effect.row
            elif isinstance(effect, Happened):
                self.events.append(effect)
                if effect.type == "replica.unreachable" and effect.key is not None:
                    self.waits.append((effect.key, self.now - self.cut_off[effect.key], self.now))
            elif isinstance(effect, Send):
                for node in self.nodes:
                    if node.session == effect.session:
                        node.receive(effect.message)
            elif isinstance(effect, CloseSession):
                self.closed[effect.session] = effect.error
                for node in self.nodes:
                    if node.session == effect.session:
                        node.session = None

    def _note_link(self, change: RowChanged) -> None:
        row, before = change.row, self.rows.get(change.key)
        if row is None or row.state is not ReplicaState.SUSPECT or not row.reason.startswith("link:"):
            self.cut_off.pop(change.key, None)
        elif before is None or before.incarnation != row.incarnation or change.key not in self.cut_off:
            self.cut_off[change.key] = self.now

    def tick(self, seconds: float = 0.0, *, step: float | None = None) -> None:
        """Let time pass, looking at the leases as often as the head does."""
        step = step or self.settings.tick_s
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + step)
            self.do(self.machine.tick(self.now))

    def link(self, row: ReplicaRow, up: bool, reason: str = "reset") -> None:
        """The head's link to a replica changes."""
        self.do(self.machine.link_changed(row.key, row.incarnation, up, reason, self.now))

    def states(self) -> dict[str, str]:
        """`stage/id` -> state, for short assertions."""
        return {f"{key.stage}/{key.replica_id}": row.state.name for key, row in sorted(self.rows.items())}

    def places(self) -> dict[str, tuple[str, ...]]:
        """`stage/id` -> node and devices."""
        return {
            f"{key.stage}/{key.replica_id}": (row.node_id, *row.device_ids) for key, row in sorted(self.rows.items())
        }

    def event_types(self) -> list[str]:
        """Types of what happened, in order."""
        return [event.type for event in self.events]


class FakeNode:
    """What a node agent would do, as far as the head sees it."""

    def __init__(self, world: World, node_id: str, devices: Sequence[device_pb.Device], hello: dict[str, Any]) -> None:
        self.world = world
        self.node_id = node_id
        self.devices = list(devices)
        self.options = hello
        self.session: int | None = None
        self.running: dict[ReplicaKey, replica_pb.ReplicaReport] = {}
        self.received: list[registry_pb.JoinResponse] = []
        self.last_epoch = ""
        self.renew()

    def renew(self) -> None:
        """The agent is started anew: new incarnation, nothing runs."""
        self.incarnation = f"{self.node_id}-{next(_incarnations)}"
        self.sequence = 0
        self.running.clear()
        self.session = None
        self.last_epoch = ""
        self.scaled: list[registry_pb.ScaledStage] = []

    def hello_message(self, **changes: Any) -> registry_pb.Hello:
        """Its Hello."""
        fields: dict[str, Any] = {
            "contract_version": "1",
            "software_version": __version__,
            "node_id": self.node_id,
            "incarnation": self.incarnation,
            "hostname": f"host-{self.node_id}",
            "host_id": f"host-{self.node_id}",
            "pid": 4242,
            "devices": self.devices,
            "running": list(self.running.values()),
            "last_head_epoch": self.last_epoch,
            "scaled": self.scaled,
            **self.options,
            **changes,
        }
        return registry_pb.Hello(**fields)

    def join(self, **changes: Any) -> FakeNode:
        """Open a session and say Hello. Raises MeshError when refused."""
        session = next(self.world.sessions)
        effects = self.world.machine.hello(session, self.hello_message(**changes), "ipv4:127.0.0.1:1", self.world.now)
        self.session, self.sequence = session, 0
        self.last_epoch = self.world.epoch
        self.world.do(effects)
        return self

    def receive(self, message: registry_pb.JoinResponse) -> None:
        """Take a message: start what is assigned, stop what is revoked."""
        self.received.append(message)
        if message.HasField("heartbeat_ack"):
            self.scaled = list(message.heartbeat_ack.scaled)
        if message.HasField("assignment"):
            assignment = message.assignment
            ref = assignment.replica
            key = ReplicaKey(ref.pipeline, ref.stage, ref.replica_id)
            if key not in self.running:
                self.running[key] = replica_pb.ReplicaReport(
                    replica=key.ref(f"r{next(_incarnations)}"),
                    pipeline_revision=assignment.pipeline_revision,
                    state=replica_pb.REPLICA_STATE_STARTING,
                    device_ids=[device.id for device in assignment.devices],
                    phase="loading weights",
                )
        elif message.HasField("revocation"):
            ref = message.revocation.replica
            key = ReplicaKey(ref.pipeline, ref.stage, ref.replica_id)
            report = self.running.get(key)
            if report is None or ref.incarnation not in ("", report.replica.incarnation):
                return
            if report.state == replica_pb.REPLICA_STATE_FAILED:
                del self.running[key]  # no process of it is left
            else:
                report.state = replica_pb.REPLICA_STATE_DRAINING

    def set(self, state: ReplicaState, *keys: ReplicaKey, **fields: Any) -> FakeNode:
        """Change what it will report of some replicas; of all without keys."""
        for key in keys or list(self.running):
            report = self.running[key]
            report.state = state.value
            if state is ReplicaState.READY and not report.endpoint:
                report.endpoint = f"127.0.0.1:{20_000 + key.replica_id}"
            for name, value in fields.items():
                if name == "error":
                    report.error.CopyFrom(value)
                else:
                    setattr(report, name, value)
        return self

    def beat(self, **fields: Any) -> FakeNode:
        """Send a heartbeat with all it runs."""
        assert self.session is not None, "it has no session"
        self.sequence += 1
        beat = registry_pb.Heartbeat(
            sequence=self.sequence, incarnation=self.incarnation, replicas=list(self.running.values())
        )
        for name, value in fields.items():
            setattr(beat, name, value)
        effects = self.world.machine.heartbeat(self.session, beat, self.world.now)
        for key, report in list(self.running.items()):
            if report.state == replica_pb.REPLICA_STATE_GONE:
                del self.running[key]
        self.world.do(effects)
        return self

    def ready(self) -> FakeNode:
        """Report everything it runs READY."""
        return self.set(ReplicaState.READY).beat()

    def crash(self) -> FakeNode:
        """kill -9: its session breaks and its replicas die with it."""
        session = self.session
        self.renew()
        if session is not None:
            self.world.do(
                self.world.machine.session_ended(session, "its session broke", self.world.now, on_purpose=False)
            )
        return self

    def disconnect(self) -> FakeNode:
        """Its connection breaks, and it lives on."""
        session, self.session = self.session, None
        if session is not None:
            self.world.do(
                self.world.machine.session_ended(session, "its session broke", self.world.now, on_purpose=False)
            )
        return self

    def leave(self) -> FakeNode:
        """Say Goodbye."""
        assert self.session is not None
        session, self.session = self.session, None
        self.world.do(self.world.machine.goodbye(session, "bye", self.world.now))
        self.renew()
        return self

    def got(self, kind: str) -> list[Any]:
        """Messages of a kind that it received."""
        return [getattr(message, kind) for message in self.received if message.WhichOneof("message") == kind]


WRITER = ReplicaKey("shapes", "writer", 0)
PAINTER = ReplicaKey("shapes", "painter", 0)


def writer_world(replicas: int = 1, **settings: Any) -> World:
    return World(pipeline(stage("writer", replicas)), **settings)


def beat_for(world: World, seconds: float, *nodes: FakeNode) -> None:
    """Let time pass with regular heartbeats."""
    end = world.now + seconds
    while world.now < end:
        world.tick(1.0)
        for node in nodes:
            node.beat()

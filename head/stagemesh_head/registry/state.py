"""The registry's state: plain records, changed only by the machine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

from google.rpc import status_pb2

from stagemesh.config import Pipeline, Stage
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_head.registry.rows import ReplicaKey, ReplicaRow, ReplicaState

MAX_REPLICAS = 10_000
"""Of one stage."""
MAX_MEMORIES = 100_000
MAX_GONE = 10_000


class NodeState(Enum):
    """Where a node stands; values are those of `stagemesh.v1.NodeState`."""

    LIVE = admin_pb.NODE_STATE_LIVE
    SUSPECT = admin_pb.NODE_STATE_SUSPECT
    DRAINING = admin_pb.NODE_STATE_DRAINING
    GONE = admin_pb.NODE_STATE_GONE


class StageKey(NamedTuple):
    """One stage of one pipeline."""

    pipeline: str
    stage: str

    def __str__(self) -> str:
        return f"{self.pipeline}/{self.stage}"

    def slot(self, replica_id: int) -> ReplicaKey:
        """The key of one of its replicas."""
        return ReplicaKey(self.pipeline, self.stage, replica_id)


def stage_of(key: ReplicaKey) -> StageKey:
    """The stage of a replica."""
    return StageKey(key.pipeline, key.stage)


@dataclass(slots=True)
class StageEntry:
    """A stage that the head serves, and how many replicas it should have."""

    key: StageKey
    config: Stage
    config_json: str
    revision: str
    """`<pipeline revision>.<digest of the stage>`; replicas of an equal digest are interchangeable."""
    target: int
    tensor_threshold_bytes: int
    """The pipeline's: outputs from this size travel by reference."""
    is_scaled: bool = False
    """An operator set the target; nodes then bring no replicas beyond it."""
    order: int = 0
    """Number of that order; nodes remember it with the target, for a restarted head."""
    is_order_own: bool = False
    """This head was given it, and did not learn it from nodes."""

    @property
    def configured(self) -> int:
        """The target of the pipeline file."""
        return self.config.runtime.num_replicas

    def fits(self, revision: str) -> bool:
        """Whether a replica of another revision of the pipeline runs this very stage."""
        return revision == self.revision or revision.rpartition(".")[2] == self.revision.rpartition(".")[2]


@dataclass(slots=True)
class Replica:
    """The owner of a slot."""

    key: ReplicaKey
    node_id: str
    device_ids: tuple[str, ...]
    revision: str
    sent_at: float
    """When its assignment was sent last."""
    incarnation: str = ""
    reported: ReplicaState = ReplicaState.ASSIGNED
    """What its node says; ASSIGNED until it has said anything."""
    report: replica_pb.ReplicaReport = field(default_factory=replica_pb.ReplicaReport)
    error: status_pb2.Status | None = None
    """What the last failure was."""
    link_up: bool | None = None
    """None: this head has not tried yet."""
    link_reason: str = ""
    cut_off_at: float = 0.0
    """Since when the link is down while its node is well."""
    drain_reason: str | None = None
    """Set: it was told to finish and go."""
    drain_grace_s: float = 0.0
    row: ReplicaRow | None = None
    """As published last."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a replica without a slot still holds."""

    device_ids: tuple[str, ...]
    at: float
    """When the node was told to stop it."""
    at_sequence: int
    """The node's last heartbeat before that."""


@dataclass(slots=True)
class Node:
    """A node agent, from its Hello until its row is forgotten."""

    node_id: str
    hello: registry_pb.Hello
    peer: str
    willing: frozenset[StageKey]
    joined_at: float
    last_heartbeat: float
    session: int | None
    sequence: int = 0
    suspect_reason: str = ""
    """Not empty: its session broke or its heartbeats are late."""
    drain_reason: str | None = None
    drain_grace_s: float | None = None
    """Set when the head ordered the drain; None when the node drains on its own account."""
    gone_at: float | None = None
    replicas: dict[ReplicaKey, Replica] = field(default_factory=dict)
    leftovers: dict[tuple[ReplicaKey, str], Leftover] = field(default_factory=dict)
    """Replicas, by incarnation, that it still runs but that own no slot any more; their devices stay taken."""
    failed: set[ReplicaKey] = field(default_factory=set)
    """Slots whose replica FAILED on it."""
    unreached: set[ReplicaKey] = field(default_factory=set)
    """Slots whose replica here the head could not reach; other nodes come first until a link to it opens."""

    @property
    def incarnation(self) -> str:
        """Id of its start."""
        return self.hello.incarnation

    @property
    def state(self) -> NodeState:
        """Where it stands."""
        if self.gone_at is not None:
            return NodeState.GONE
        if self.suspect_reason:
            return NodeState.SUSPECT
        return NodeState.DRAINING if self.drain_reason is not None else NodeState.LIVE

    @property
    def is_local(self) -> bool:
        """Whether the head's own command started it, so that reserved slots are for it."""
        return self.hello.labels.get("stagemesh.local") == "true"


@dataclass(frozen=True, slots=True)
class GoneReplica:
    """A row kept for people, and the fence against its return."""

    status: registry_pb.ReplicaStatus
    at: float
    is_final: bool
    """Its process ended or was told to end: no report brings it back. Else it was out of sight only."""


@dataclass(slots=True)
class State:
    """Everything the registry knows. Soft: nodes bring it back after a restart of the head."""

    stages: dict[StageKey, StageEntry]
    nodes: dict[str, Node] = field(default_factory=dict)
    sessions: dict[int, Node] = field(default_factory=dict)
    replicas: dict[ReplicaKey, Replica] = field(default_factory=dict)
    memory: OrderedDict[ReplicaKey, tuple[str, tuple[str, ...]]] = field(default_factory=OrderedDict)
    """Slot -> node and devices that it had last."""
    gone: OrderedDict[tuple[ReplicaKey, str], GoneReplica] = field(default_factory=OrderedDict)
    replacements: dict[ReplicaKey, tuple[int, float]] = field(default_factory=dict)
    """Slot -> how often its replica was replaced since the head could not reach it, and when last."""

    def remember(self, replica: Replica) -> None:
        """Note who has a slot, so that it returns there."""
        self.memory[replica.key] = (replica.node_id, replica.device_ids)
        self.memory.move_to_end(replica.key)
        while len(self.memory) > MAX_MEMORIES:
            self.memory.popitem(last=False)

    def bury(self, key: tuple[ReplicaKey, str], row: GoneReplica) -> None:
        """Keep the row of a replica that is no more."""
        self.gone.pop(key, None)
        self.gone[key] = row
        while len(self.gone) > MAX_GONE:
            self.gone.popitem(last=False)

    def present_nodes(self) -> Iterator[Node]:
        """All that are not GONE."""
        return (node for node in self.nodes.values() if node.gone_at is None)


def stage_entries(pipelines: Sequence[Pipeline]) -> dict[StageKey, StageEntry]:
    """The stages of `pipelines`, in order."""
    entries = {}
    for pipeline in pipelines:
        for stage in pipeline.stages:
            key = StageKey(pipeline.name, stage.name)
            text = stage.model_dump_json()
            # How many there are does not change what one is.
            counted = stage.model_copy(update={"runtime": stage.runtime.model_copy(update={"num_replicas": 0})})
            digest = blake2b(counted.model_dump_json().encode(), digest_size=6).hexdigest()
            entries[key] = StageEntry(
                key,
                stage,
                text,
                f"{pipeline.revision}.{digest}",
                stage.runtime.num_replicas,
                pipeline.limits.tensor_threshold_bytes,
            )
    return entries

"""How far a mesh is on its way to serving, from what its head says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stagemesh.client.admin import AdminClient
from stagemesh.client.errors import StartFailed
from stagemesh.client.pipelines import PipelineInfo
from stagemesh.client.sync import Client
from stagemesh.rpc.errors import Reason
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh.wire import enum_word


@dataclass(frozen=True, slots=True)
class SlotProgress:
    """Where one replica stands."""

    pipeline: str
    stage: str
    replica_id: int
    state: str
    """missing, or a replica state in lower case."""
    detail: str
    """What it does, or why it is not there."""
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Where the whole mesh stands."""

    slots: tuple[SlotProgress, ...]
    is_ready: bool
    """Every stage has all the replicas it should have."""
    failures: tuple[StartFailed, ...]
    """Replicas that cannot run, each with its engine's last lines."""


def look(client: Client, admin: AdminClient) -> Readiness:
    """Ask the head."""
    replicas, missing = admin.list_replicas()
    return assess(client.list_pipelines(), replicas, missing)


def assess(
    pipelines: Iterable[PipelineInfo],
    replicas: Sequence[registry_pb.ReplicaStatus],
    missing: Sequence[admin_pb.MissingSlot],
) -> Readiness:
    """Judge a head's answers."""
    slots = [_slot(replica) for replica in replicas]
    slots += [
        SlotProgress(slot.replica.pipeline, slot.replica.stage, slot.replica.replica_id, "missing", slot.reason)
        for slot in missing
    ]
    slots.sort(key=lambda slot: (slot.pipeline, slot.stage, slot.replica_id))
    is_ready = not missing and all(
        stage.ready_replicas >= stage.target_replicas for pipeline in pipelines for stage in pipeline.stages
    )
    failed = [replica for replica in replicas if replica.state == replica_pb.REPLICA_STATE_FAILED]
    return Readiness(tuple(slots), is_ready, tuple(map(_failure, failed)))


def _slot(replica: registry_pb.ReplicaStatus) -> SlotProgress:
    report = replica.report
    is_starting = replica.state in (replica_pb.REPLICA_STATE_ASSIGNED, replica_pb.REPLICA_STATE_STARTING)
    detail = (report.phase or replica.reason) if is_starting else replica.reason
    if report.restarts:
        why = next(iter(replica.last_error.message.strip().splitlines()), "")
        detail = f"{detail} (restarted {report.restarts} ×{': ' * bool(why)}{why})".strip()
    ref = report.replica
    state = enum_word(replica_pb.ReplicaState, replica.state)
    return SlotProgress(ref.pipeline, ref.stage, ref.replica_id, state, detail, replica.node_id)


def _failure(replica: registry_pb.ReplicaStatus) -> StartFailed:
    ref = replica.report.replica
    told = replica.last_error.message or replica.report.error.message or replica.reason or "no reason was given"
    first, *rest = told.strip().splitlines() or [told]
    error = StartFailed(
        Reason.START_FAILED,
        f"{ref.stage}/{ref.replica_id} on node {replica.node_id} cannot start: {first}",
        stage=ref.stage,
        replica=ref.replica_id,
        node=replica.node_id,
    )
    error.details = tuple(rest)
    return error

"""What a node tells its head of a replica."""

from __future__ import annotations

from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh.wire import duration
from stagemesh_worker.node.lifecycle import ReplicaLife
from stagemesh_worker.replica import control


def report_of(life: ReplicaLife) -> replica_pb.ReplicaReport:
    """The node's word on one replica now."""
    report = replica_pb.ReplicaReport(
        replica=life.assignment.replica,
        pipeline_revision=life.assignment.pipeline_revision,
        state=life.state,
        endpoint=life.endpoint,
        device_ids=[device.id for device in life.assignment.devices],
        phase=life.phase,
        pid=life.pid,
        restarts=life.restarts,
    )
    report.replica.incarnation = life.incarnation
    if life.error is not None:
        report.error.CopyFrom(life.error.to_status())
    if life.load is not None:
        report.load.CopyFrom(_load(life.load))
    return report


def _load(load: control.Load) -> replica_pb.ReplicaLoad:
    return replica_pb.ReplicaLoad(
        running=load.running,
        waiting=load.waiting,
        kv_cache_usage=load.kv_cache_usage,
        engine_steps=load.engine_steps,
        since_progress=duration(load.since_progress_s),
        memory_bytes=load.memory_bytes,
        prompt_tokens_computed=load.prompt_tokens_computed,
        prompt_tokens_cached=load.prompt_tokens_cached,
        prompt_tokens_received=load.prompt_tokens_received,
    )

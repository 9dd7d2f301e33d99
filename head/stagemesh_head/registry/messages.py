"""The head's messages to a node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.wire import duration
from stagemesh_head.registry.rows import ReplicaKey
from stagemesh_head.registry.settings import RegistrySettings
from stagemesh_head.registry.state import Node, Replica, StageEntry


def welcome(settings: RegistrySettings) -> registry_pb.JoinResponse:
    """Answer to Hello; the shell fills in the header."""
    return registry_pb.JoinResponse(
        welcome=registry_pb.Welcome(
            heartbeat_interval=duration(settings.heartbeat_interval_s), lease_duration=duration(settings.lease_s)
        )
    )


def heartbeat_ack(
    sequence: int, problems: Sequence[str] = (), scaled: Sequence[registry_pb.ScaledStage] = ()
) -> registry_pb.JoinResponse:
    """Answer to a heartbeat."""
    ack = registry_pb.HeartbeatAck(sequence=sequence, problems=problems, scaled=scaled)
    return registry_pb.JoinResponse(heartbeat_ack=ack)


def assignment(replica: Replica, node: Node, entry: StageEntry) -> registry_pb.JoinResponse:
    """Run this replica."""
    given = set(replica.device_ids)
    return registry_pb.JoinResponse(
        assignment=registry_pb.Assignment(
            replica=replica.key.ref(),
            pipeline_revision=replica.revision,
            devices=[device for device in node.hello.devices if device.id in given],
            stage_config_json=entry.config_json,
            start_timeout=duration(entry.config.runtime.stage_init_timeout),
            tensor_threshold_bytes=entry.tensor_threshold_bytes,
        )
    )


def revocation(key: ReplicaKey, incarnation: str, grace_s: float, reason: str) -> registry_pb.JoinResponse:
    """Stop this replica."""
    return registry_pb.JoinResponse(
        revocation=registry_pb.Revocation(replica=key.ref(incarnation), grace=duration(grace_s), reason=reason)
    )


def drain_order(grace_s: float, reason: str) -> registry_pb.JoinResponse:
    """Leave."""
    return registry_pb.JoinResponse(drain=registry_pb.DrainOrder(grace=duration(grace_s), reason=reason))


def scaled_stages(entries: Iterable[StageEntry]) -> list[registry_pb.ScaledStage]:
    """The stages whose target is an operator's."""
    return [
        registry_pb.ScaledStage(
            pipeline=entry.key.pipeline,
            stage=entry.key.stage,
            replicas=entry.target,
            configured=entry.configured,
            order=entry.order,
        )
        for entry in entries
        if entry.is_scaled
    ]


def dial_problems(node: Node) -> list[str]:
    """Which replicas of a node the head has no link to, and why, in sentences for the node's log."""
    return [
        f"the head cannot reach {key.stage}/{key.replica_id} at {replica.report.endpoint}: {replica.link_reason}"
        for key, replica in node.replicas.items()
        if replica.link_up is False
    ]

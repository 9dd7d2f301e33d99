"""The registry's state as messages for people and programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.wire import duration
from stagemesh_head.registry.book import replica_status
from stagemesh_head.registry.placement import Reserved, missing_slots, room_of
from stagemesh_head.registry.rows import ReplicaKey
from stagemesh_head.registry.state import Node, NodeState, Replica, State

Inflight = Callable[[ReplicaKey], int]


def node_info(node: Node, state: State, now: float) -> admin_pb.NodeInfo:
    """One node."""
    is_gone = node.state is NodeState.GONE
    occupancy = room_of(node, state).occupancy
    return admin_pb.NodeInfo(
        node_id=node.node_id,
        incarnation=node.incarnation,
        state=node.state.value,
        hostname=node.hello.hostname,
        peer=node.peer,
        devices=node.hello.devices,
        stages=node.hello.stages,
        replicas=[replica.key.ref(replica.incarnation) for _, replica in sorted(node.replicas.items())],
        lease_age=duration(now - node.last_heartbeat),
        labels=dict(node.hello.labels),
        software_version=node.hello.software_version,
        free_device_ids=[d.id for d in node.hello.devices if d.id not in occupancy and not is_gone],
    )


def replica_view(replica: Replica, state: State, now: float, inflight: Inflight | None) -> registry_pb.ReplicaStatus:
    """One replica, with its node's lease age and this head's tasks on it."""
    status = replica_status(replica)
    status.lease_age.CopyFrom(duration(now - state.nodes[replica.node_id].last_heartbeat))
    if inflight is not None:
        status.inflight = inflight(replica.key)
    return status


def gone_views(state: State) -> Iterable[tuple[ReplicaKey, registry_pb.ReplicaStatus]]:
    """The rows that are kept of replicas that are no more."""
    return ((key, row.status) for (key, _), row in state.gone.items())


def missing_views(state: State, reserved: Reserved, *, is_holding: bool) -> list[admin_pb.MissingSlot]:
    """Slots that should have a replica and have none, and why."""
    wait = "the head was restarted and waits for the nodes it had; " if is_holding else ""
    return [
        admin_pb.MissingSlot(replica=key.ref(), reason=wait + reason)
        for key, reason in missing_slots(state, reserved)
    ]

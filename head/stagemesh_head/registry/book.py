"""The registry's bookkeeping: the few ways in which state changes, each with the effects it has."""

from __future__ import annotations

from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_head.registry import messages
from stagemesh_head.registry.effects import Effect, Happened, RowChanged, Send
from stagemesh_head.registry.rows import ReplicaRow, ReplicaState
from stagemesh_head.registry.settings import RegistrySettings
from stagemesh_head.registry.state import GoneReplica, Leftover, Node, Replica, State, stage_of

KV_CACHE_STEP = 0.05
"""A KV cache's use must change by that much to be news."""


class Book:
    """State, and the effects of the event at hand."""

    def __init__(self, state: State, settings: RegistrySettings) -> None:
        self.state = state
        self.settings = settings
        self.effects: list[Effect] = []
        self.has_room_news = False
        """Slots or room appeared: placement may have something to do."""

    def take_effects(self) -> list[Effect]:
        """What is to be done since the last call."""
        effects, self.effects = self.effects, []
        return effects

    # -- replicas -----------------------------------------------------------
    def add(self, replica: Replica, node: Node) -> None:
        """A node gets a slot that nobody has."""
        assert replica.key not in self.state.replicas
        self.state.replicas[replica.key] = replica
        node.replicas[replica.key] = replica
        self.state.remember(replica)

    def remove(self, replica: Replica, reason: str, now: float, *, is_final: bool) -> None:
        """A replica is over: its slot is free, and its row goes to the archive.

        Args:
            is_final: its process ended or was told to; a later report of it is refused.
        """
        node = self.state.nodes[replica.node_id]
        del self.state.replicas[replica.key]
        del node.replicas[replica.key]
        before = replica.row.state if replica.row is not None else ReplicaState.ASSIGNED
        status = replica_status(replica)
        status.state = replica_pb.REPLICA_STATE_GONE
        status.reason = reason
        self.state.bury((replica.key, replica.incarnation), GoneReplica(status, now, is_final))
        self.effects.append(RowChanged(replica.key, None, replica.incarnation))
        self._replica_event(replica, before, ReplicaState.GONE, reason)
        self.has_room_news = True

    def publish(self, replica: Replica) -> None:
        """Work out what routing goes by, and tell if it changed."""
        node = self.state.nodes[replica.node_id]
        state, reason = derive(replica, node)
        old = replica.row
        report = replica.report
        load = report.load if report.HasField("load") else None
        if (
            old is not None
            and old.state is state
            and old.reason == reason
            and old.incarnation == replica.incarnation
            and old.endpoint == report.endpoint
            and old.phase == report.phase
            and old.pid == report.pid
            and old.restarts == report.restarts
        ):
            if not _is_load_news(old.load, load):
                return
            only_load = True
        else:
            only_load = False
        row = ReplicaRow(
            key=replica.key,
            incarnation=replica.incarnation,
            node_id=replica.node_id,
            state=state,
            endpoint=report.endpoint,
            pipeline_revision=replica.revision,
            device_ids=replica.device_ids,
            load=load,
            phase=report.phase,
            reason=reason,
            pid=report.pid,
            restarts=report.restarts,
        )
        replica.row = row
        self.effects.append(RowChanged(replica.key, row, replica.incarnation, only_load))
        if old is None or old.state is not state or old.incarnation != replica.incarnation:
            self._replica_event(replica, old.state if old is not None else None, state, reason)

    def republish(self, node: Node) -> None:
        """The node's own state changed, and with it what holds for its replicas."""
        for replica in list(node.replicas.values()):
            self.publish(replica)

    # -- messages -----------------------------------------------------------
    def send_assignment(self, replica: Replica, node: Node, now: float) -> None:
        """Have the node run it; nothing while its session is broken, since a re-join sends it again."""
        replica.sent_at = now
        if node.session is not None:
            entry = self.state.stages[stage_of(replica.key)]
            self.effects.append(Send(node.session, messages.assignment(replica, node, entry)))

    def send_revocation(self, replica: Replica, node: Node) -> None:
        """Have the node drain and stop it, as its drain order says."""
        if node.session is not None:
            message = messages.revocation(
                replica.key, replica.incarnation, replica.drain_grace_s, replica.drain_reason or "revoked"
            )
            self.effects.append(Send(node.session, message))

    def evict(self, replica: Replica, node: Node, reason: str, now: float) -> None:
        """Take the slot from a replica at once; its process is told to stop and keeps its devices until it has."""
        replica.drain_reason, replica.drain_grace_s = reason, 0.0
        self.send_revocation(replica, node)
        if replica.reported is not ReplicaState.FAILED:
            node.leftovers[replica.key, replica.incarnation] = Leftover(replica.device_ids, now, node.sequence)
        self.remove(replica, reason, now, is_final=True)

    # -- events -------------------------------------------------------------
    def node_event(self, type_: str, node: Node, reason: str, from_state: str) -> None:
        """Something happened to a node, which now is in its new state."""
        self.effects.append(
            Happened(type_, node.node_id, reason=reason, from_state=from_state, to_state=node.state.name)
        )

    def _replica_event(self, replica: Replica, before: ReplicaState | None, after: ReplicaState, reason: str) -> None:
        self.effects.append(
            Happened(
                f"replica.{after.name.lower()}",
                replica.node_id,
                replica.key,
                replica.incarnation,
                reason or replica.report.phase,
                before.name if before is not None else "",
                after.name,
            )
        )


def derive(replica: Replica, node: Node) -> tuple[ReplicaState, str]:
    """The state that routing goes by, and why.

    A function of what is known now, so that whatever heals, heals.
    """
    reported = replica.reported
    if reported is ReplicaState.FAILED:
        return reported, _message(replica)
    if replica.drain_reason is not None:
        return ReplicaState.DRAINING, replica.drain_reason
    if node.drain_reason is not None:
        return ReplicaState.DRAINING, f"node {node.node_id}: {node.drain_reason}"
    if reported is ReplicaState.DRAINING:
        return reported, _message(replica) or "its node drains it"
    if reported is ReplicaState.SUSPECT:
        return reported, _message(replica)
    if reported is ReplicaState.READY:
        if node.suspect_reason:
            return ReplicaState.SUSPECT, f"node {node.node_id}: {node.suspect_reason}"
        if replica.link_up is False:
            return ReplicaState.SUSPECT, f"link: {replica.link_reason}"
    if reported is ReplicaState.STARTING and replica.report.restarts:
        return reported, _message(replica)
    return reported, ""


def replica_status(replica: Replica) -> registry_pb.ReplicaStatus:
    """A row on the wire, without lease age and tasks in flight."""
    status = registry_pb.ReplicaStatus(report=replica.report, node_id=replica.node_id)
    # What the node has not said yet, the assignment says.
    status.report.replica.CopyFrom(replica.key.ref(replica.incarnation))
    status.report.pipeline_revision = replica.revision
    if not status.report.device_ids:
        status.report.device_ids.extend(replica.device_ids)
    if status.report.state == replica_pb.REPLICA_STATE_UNSPECIFIED:
        status.report.state = replica_pb.REPLICA_STATE_ASSIGNED
    if replica.row is not None:
        status.state = replica.row.state.value
        status.reason = replica.row.reason
    if replica.error is not None:
        status.last_error.CopyFrom(replica.error)
    return status


def _message(replica: Replica) -> str:
    return replica.report.error.message if replica.report.HasField("error") else ""


def _is_load_news(old: replica_pb.ReplicaLoad | None, new: replica_pb.ReplicaLoad | None) -> bool:
    if old is None or new is None:
        return old is not new
    return (
        old.running != new.running
        or old.waiting != new.waiting
        or abs(old.kv_cache_usage - new.kv_cache_usage) >= KV_CACHE_STEP
    )

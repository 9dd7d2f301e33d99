"""What operators order: drain a replica, drain a node, scale a stage."""

from __future__ import annotations

from collections.abc import Sequence

from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh_head.registry import messages
from stagemesh_head.registry.book import Book
from stagemesh_head.registry.effects import Happened, Send
from stagemesh_head.registry.rows import ReplicaKey, ReplicaState
from stagemesh_head.registry.state import MAX_REPLICAS, Replica, StageEntry, StageKey, stage_of
from stagemesh_head.registry.words import hint, pipeline_named

MAX_GRACE_S = 86_400.0


def drain_replica(book: Book, key: ReplicaKey, incarnation: str, grace_s: float, reason: str, now: float) -> None:
    """Have a replica finish and go; the slot is filled again where there is room.

    Raises:
        MeshError: UNKNOWN_STAGE, UNKNOWN_REPLICA, STALE_INCARNATION, INVALID_REQUEST.
    """
    _check_grace(grace_s)
    entry_of(book, key.pipeline, key.stage)
    replica = book.state.replicas.get(key)
    if replica is None:
        ids = sorted(other.replica_id for other in book.state.replicas if stage_of(other) == stage_of(key))
        there = f"there are {', '.join(map(str, ids))}" if ids else "the stage has none"
        raise MeshError(Reason.UNKNOWN_REPLICA, f"there is no replica {key}; {there}", replica=key)
    if incarnation and incarnation != replica.incarnation:
        raise MeshError(
            Reason.STALE_INCARNATION,
            f"replica {key} is incarnation {replica.incarnation or 'not started'} now, not {incarnation}",
            replica=key,
        )
    send_away(book, replica, grace_s, reason or "an operator drains it", now)


def drain_node(book: Book, node_id: str, grace_s: float, reason: str) -> None:
    """Have a node finish what it has, and leave.

    Raises:
        MeshError: NODE_UNKNOWN, INVALID_REQUEST.
    """
    _check_grace(grace_s)
    node = book.state.nodes.get(node_id)
    if node is None or node.gone_at is not None:
        names = sorted(other.node_id for other in book.state.present_nodes())
        there = f"there are {', '.join(names)}" if names else "there is none"
        why = f"node {node_id!r} is gone" if node is not None else f"there is no node {node_id!r}"
        raise MeshError(Reason.NODE_UNKNOWN, f"{why}; {there}{hint(node_id, names)}", node=node_id)
    before = node.state.name
    node.drain_reason, node.drain_grace_s = reason or "an operator drains it", grace_s
    if node.session is not None:
        book.effects.append(Send(node.session, messages.drain_order(grace_s, node.drain_reason)))
    book.node_event("node.draining", node, node.drain_reason, from_state=before)
    book.republish(node)


def scale_stage(book: Book, pipeline: str, stage: str, replicas: int, now: float) -> int:
    """Set how many replicas a stage should have; the highest ids go first. Returns the target before.

    Raises:
        MeshError: UNKNOWN_PIPELINE, UNKNOWN_STAGE, INVALID_REQUEST.
    """
    if not 0 <= replicas <= MAX_REPLICAS:
        raise invalid("replicas", replicas, f"must be 0 to {MAX_REPLICAS}")
    entry = entry_of(book, pipeline, stage)
    previous = entry.target
    entry.order, entry.is_order_own = entry.order + 1, True
    _set_target(book, entry, replicas, f"the stage is scaled from {previous} to {replicas}", now)
    return previous


def recall_scaling(book: Book, told: Sequence[registry_pb.ScaledStage], now: float) -> None:
    """A node tells what an earlier head was ordered. What this head was ordered itself is newer than that."""
    for scaled in told:
        entry = book.state.stages.get(StageKey(scaled.pipeline, scaled.stage))
        if entry is None or scaled.order <= entry.order or scaled.configured != entry.configured:
            continue
        if entry.is_order_own:
            entry.order = scaled.order + 1
        else:
            entry.order = scaled.order
            reason = f"the stage was scaled to {scaled.replicas} before this head started, as its nodes tell"
            _set_target(book, entry, scaled.replicas, reason, now)


def _set_target(book: Book, entry: StageEntry, replicas: int, reason: str, now: float) -> None:
    entry.target, entry.is_scaled = replicas, True
    book.effects.append(Happened("stage.scaled", "", entry.key.slot(0), reason=f"{entry.key}: {reason}"))
    surplus = [r for r in book.state.replicas.values() if stage_of(r.key) == entry.key and r.key.replica_id >= replicas]
    for replica in sorted(surplus, key=lambda r: r.key, reverse=True):
        if replica.drain_reason is None:
            send_away(book, replica, book.settings.drain_grace_s, reason, now)
    book.has_room_news = True


def entry_of(book: Book, pipeline: str, stage: str) -> StageEntry:
    """The stage of that name; the pipeline may be left out when there is just one.

    Raises:
        MeshError: UNKNOWN_PIPELINE, UNKNOWN_STAGE, INVALID_REQUEST.
    """
    pipeline = pipeline_of(book, pipeline)
    entry = book.state.stages.get(StageKey(pipeline, stage))
    if entry is None:
        names = [key.stage for key in book.state.stages if key.pipeline == pipeline]
        raise MeshError(
            Reason.UNKNOWN_STAGE,
            f"pipeline {pipeline!r} has no stage {stage!r}; it has {', '.join(names)}{hint(stage, names)}",
            stage=stage,
        )
    return entry


def pipeline_of(book: Book, pipeline: str) -> str:
    """The pipeline of that name, or the only one for the empty name.

    Raises:
        MeshError: UNKNOWN_PIPELINE, INVALID_REQUEST.
    """
    return pipeline_named(pipeline, dict.fromkeys(key.pipeline for key in book.state.stages))


def send_away(book: Book, replica: Replica, grace_s: float, reason: str, now: float) -> None:
    """Have a replica finish and go, whoever wants it."""
    node = book.state.nodes[replica.node_id]
    if replica.reported in (ReplicaState.ASSIGNED, ReplicaState.FAILED):
        # It has no process that could finish anything. After a drain the node may try the slot again.
        node.failed.discard(replica.key)
        book.evict(replica, node, reason, now)
        return
    replica.drain_reason, replica.drain_grace_s = reason, grace_s
    book.send_revocation(replica, node)
    book.publish(replica)


def _check_grace(grace_s: float) -> None:
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise invalid("grace", f"{grace_s:g}s", f"must be 0 s to {MAX_GRACE_S:g} s")

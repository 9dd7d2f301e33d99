"""What a node says of its replicas, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from stagemesh.rpc.errors import invalid
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_head.registry import messages
from stagemesh_head.registry.book import Book
from stagemesh_head.registry.devices import may_share
from stagemesh_head.registry.effects import Send
from stagemesh_head.registry.rows import ReplicaKey, ReplicaState
from stagemesh_head.registry.state import Leftover, Node, Replica, StageKey, stage_of

MAX_REPORTS = 4_096
MAX_FIELD_CHARS = 4_096
_STATES = {
    state.value: state
    for state in (
        ReplicaState.STARTING,
        ReplicaState.READY,
        ReplicaState.SUSPECT,
        ReplicaState.DRAINING,
        ReplicaState.GONE,
        ReplicaState.FAILED,
    )
}
_NAMES = [state.name for state in _STATES.values()]


def check_reports(reports: Sequence[replica_pb.ReplicaReport], field: str) -> None:
    """Refuse reports that cannot be read, before any of them counts.

    Raises:
        MeshError: INVALID_REQUEST that names the field.
    """
    if len(reports) > MAX_REPORTS:
        raise invalid(field, len(reports), f"at most {MAX_REPORTS} replicas")
    seen = set()
    for index, report in enumerate(reports):
        ref = report.replica
        if report.state not in _STATES:
            raise invalid(f"{field}[{index}].state", report.state, f"must be one of {', '.join(_NAMES)}")
        if not ref.incarnation or len(ref.incarnation) > 64:
            raise invalid(f"{field}[{index}].replica.incarnation", ref.incarnation, "must have 1 to 64 characters")
        if report.state == replica_pb.REPLICA_STATE_READY and not report.endpoint:
            raise invalid(f"{field}[{index}].endpoint", "", "must be host:port when the replica is READY")
        if len(report.endpoint) > 256 or len(report.phase) > MAX_FIELD_CHARS:
            raise invalid(f"{field}[{index}].phase", report.phase, f"at most {MAX_FIELD_CHARS} characters")
        name = (ref.pipeline, ref.stage, ref.replica_id, ref.incarnation)
        if name in seen:
            raise invalid(f"{field}[{index}].replica", "/".join(map(str, name)), "is reported twice")
        seen.add(name)


def take_reports(book: Book, node: Node, reports: Sequence[replica_pb.ReplicaReport], now: float) -> None:
    """Take a node's word: `reports` are all the replicas that it runs."""
    seen: set[ReplicaKey] = set()
    alive: set[tuple[ReplicaKey, str]] = set()
    for report in reports:
        ref = report.replica
        key = ReplicaKey.of(ref)
        name = (key, ref.incarnation)
        if report.state != replica_pb.REPLICA_STATE_GONE:
            alive.add(name)
        elif name not in book.state.gone and node.leftovers.pop((key, ""), None) is not None:
            book.has_room_news = True  # it had been started, and now is stopped
        if name in node.leftovers:
            continue
        replica = node.replicas.get(key)
        if replica is not None and _is_of_its_slot(book, replica, ref.incarnation):
            seen.add(key)
            _update(book, node, replica, report, now)
        elif replica is None and name in alive and _claim(book, node, key, report, now):
            seen.add(key)
    for key, replica in list(node.replicas.items()):
        if key not in seen and replica.incarnation:
            book.remove(replica, "its node no longer has it", now, is_final=True)
    for name in [name for name in node.leftovers if name not in alive and _has_stopped(book, node, name, now)]:
        del node.leftovers[name]
        book.has_room_news = True


def _has_stopped(book: Book, node: Node, name: tuple[ReplicaKey, str], now: float) -> bool:
    """Whether a leftover that is not reported is over.

    One that was told to stop before it was ever reported may be missing in heartbeats that were under way then.
    """
    leftover = node.leftovers[name]
    is_old = now - leftover.at >= book.settings.heartbeat_interval_s
    return bool(name[1]) or (is_old and node.sequence >= leftover.at_sequence + 2)


def _is_of_its_slot(book: Book, replica: Replica, incarnation: str) -> bool:
    """Whether a report speaks of the slot's present process or a newer one, not of one that is over."""
    if replica.incarnation == incarnation:
        return True
    gone = book.state.gone.get((replica.key, incarnation))
    return gone is None or not gone.is_final


def _update(book: Book, node: Node, replica: Replica, report: replica_pb.ReplicaReport, now: float) -> None:
    state = _STATES[report.state]
    if state is ReplicaState.GONE:
        if report.HasField("error"):
            replica.error = report.error
        replica.report = report
        book.remove(replica, report.error.message or replica.drain_reason or "it ended", now, is_final=True)
        return
    if replica.reported is ReplicaState.FAILED and state is not ReplicaState.FAILED:
        # Its devices were free since it failed.
        conflict = _device_conflict(book, node, replica.key, replica.device_ids)
        if conflict is not None:
            replica.reported, replica.incarnation = state, report.replica.incarnation
            book.evict(replica, node, conflict, now)
            return
    if replica.incarnation != report.replica.incarnation:
        # A new process in the slot: what was known of the old one's link is void.
        replica.incarnation = report.replica.incarnation
        replica.link_up, replica.link_reason = None, ""
        if replica.drain_reason is not None:
            book.send_revocation(replica, node)
    replica.reported, replica.report = state, report
    if report.HasField("error"):
        replica.error = report.error
    if state is ReplicaState.READY:
        node.failed.discard(replica.key)  # what made it fail has passed
    if state is ReplicaState.FAILED and replica.key not in node.failed:
        node.failed.add(replica.key)
        book.has_room_news = True
    book.publish(replica)


def _claim(book: Book, node: Node, key: ReplicaKey, report: replica_pb.ReplicaReport, now: float) -> bool:
    """A node runs a replica that this head did not give it: after a restart of the head, or after its lease ran out.

    True when it keeps the slot.
    """
    refusal = _why_not(book, node, key, report, now)
    if refusal is not None:
        _turn_away(book, node, key, report, refusal, now)
        return False
    entry = book.state.stages[stage_of(key)]
    book.state.gone.pop((key, report.replica.incarnation), None)
    replica = Replica(key, node.node_id, tuple(report.device_ids), report.pipeline_revision, sent_at=now)
    book.add(replica, node)
    _update(book, node, replica, report, now)
    if not entry.fits(report.pipeline_revision):
        replica.drain_reason = f"it runs revision {report.pipeline_revision}, this head serves {entry.revision}"
        replica.drain_grace_s = book.settings.drain_grace_s
        book.send_revocation(replica, node)
        book.publish(replica)
    return True


def _why_not(book: Book, node: Node, key: ReplicaKey, report: replica_pb.ReplicaReport, now: float) -> str | None:
    entry = book.state.stages.get(stage_of(key))
    if entry is None:
        return f"this head serves no stage {StageKey(key.pipeline, key.stage)}"
    gone = book.state.gone.get((key, report.replica.incarnation))
    if gone is not None and gone.is_final:
        return f"it is over: {gone.status.reason}"
    if (key, "") in node.leftovers:
        return "it was told to stop when it had just been assigned"
    if entry.is_scaled and key.replica_id >= entry.target:
        return f"the stage is scaled to {entry.target}"
    offered = {device.id for device in node.hello.devices}
    strange = [device_id for device_id in report.device_ids if device_id not in offered]
    if strange:
        return f"its node no longer offers {', '.join(strange)}"
    if report.state == replica_pb.REPLICA_STATE_FAILED and not entry.fits(report.pipeline_revision):
        return f"it failed with revision {report.pipeline_revision}, this head serves {entry.revision}"
    conflict = _device_conflict(book, node, key, report.device_ids)
    if conflict is not None:
        return conflict
    owner = book.state.replicas.get(key)
    if owner is None:
        return None
    # Two nodes for one slot. A loaded model beats one that still loads; else who has it keeps it.
    is_loaded = report.state == replica_pb.REPLICA_STATE_READY and entry.fits(report.pipeline_revision)
    if is_loaded and owner.reported in (ReplicaState.ASSIGNED, ReplicaState.STARTING, ReplicaState.FAILED):
        book.evict(owner, book.state.nodes[owner.node_id], f"node {node.node_id} has the slot loaded already", now)
        return None
    return f"node {owner.node_id} has the slot"


def _device_conflict(book: Book, node: Node, key: ReplicaKey, device_ids: Sequence[str]) -> str | None:
    """Which other replica of the node has one of the devices for itself; FAILED ones have none."""
    entry = book.state.stages[stage_of(key)]
    for other in node.replicas.values():
        if other.key == key or other.reported is ReplicaState.FAILED:
            continue
        held = set(other.device_ids).intersection(device_ids)
        if held and not may_share(entry, book.state.stages[stage_of(other.key)]):
            return f"device {min(held)} has replica {other.key}"
    return None


def _turn_away(
    book: Book, node: Node, key: ReplicaKey, report: replica_pb.ReplicaReport, reason: str, now: float
) -> None:
    incarnation = report.replica.incarnation
    # A FAILED one has no process, hence no devices.
    is_over = report.state == replica_pb.REPLICA_STATE_FAILED
    node.leftovers[key, incarnation] = Leftover(() if is_over else tuple(report.device_ids), now, node.sequence)
    node.leftovers.pop((key, ""), None)
    grace_s = book.settings.drain_grace_s if report.state == replica_pb.REPLICA_STATE_READY else 0.0
    if node.session is not None:
        book.effects.append(Send(node.session, messages.revocation(key, incarnation, grace_s, reason)))

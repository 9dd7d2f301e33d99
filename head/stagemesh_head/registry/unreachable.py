"""What becomes of a replica that is well, as its node says, but that the head cannot reach."""

from __future__ import annotations

from math import inf

from stagemesh_head.registry.book import Book
from stagemesh_head.registry.effects import Happened
from stagemesh_head.registry.orders import send_away
from stagemesh_head.registry.rows import ReplicaKey, ReplicaState
from stagemesh_head.registry.state import Node, NodeState, Replica, State

MAX_DOUBLINGS = 5
FORGIVEN_AFTER_S = 3600.0
"""A slot that was not replaced for so long begins anew with the first patience."""


def link_changed(node: Node, replica: Replica, up: bool, reason: str, now: float) -> None:
    """The head's link to a replica opened or broke."""
    if up:
        node.unreached.clear()
    elif replica.link_up is not False:
        replica.cut_off_at = now
    replica.link_up, replica.link_reason = up, reason


def replace_unreachable(book: Book, now: float, *, stalled: bool) -> None:
    """Send away what could not be reached for too long. It drains, and its slot goes to another node, or is tried anew.

    Args:
        stalled: this head stood still, so that its own view of the links is old.
    """
    for node in list(book.state.present_nodes()):
        for replica in list(node.replicas.values()):
            if replica.link_up is not False:
                continue
            # While the node itself is away or has something to say of it, the link proves nothing.
            is_well = node.state is NodeState.LIVE and replica.reported is ReplicaState.READY
            if stalled or not is_well or replica.drain_reason is not None:
                replica.cut_off_at = now
            elif now - replica.cut_off_at >= _patience_s(book, replica.key, now):
                _replace(book, node, replica, now)


def forget_replacements(state: State, now: float) -> None:
    """Drop what counts no more."""
    for key in [key for key, (_, at) in state.replacements.items() if now - at > FORGIVEN_AFTER_S]:
        del state.replacements[key]


def _patience_s(book: Book, key: ReplicaKey, now: float) -> float:
    """Doubled with every time that it did not help, so that nothing is started over and over."""
    times, at = book.state.replacements.get(key, (0, -inf))
    if now - at > FORGIVEN_AFTER_S:
        times = 0
    return book.settings.unreachable_after_s * 2.0 ** min(times, MAX_DOUBLINGS)


def _replace(book: Book, node: Node, replica: Replica, now: float) -> None:
    state = book.state
    times, at = state.replacements.get(replica.key, (0, -inf))
    state.replacements[replica.key] = (times + 1 if now - at <= FORGIVEN_AFTER_S else 1, now)
    node.unreached.add(replica.key)
    state.memory.pop(replica.key, None)  # the slot need not come back here
    reason = (
        f"the head has not reached it for {now - replica.cut_off_at:.0f} s, though node {node.node_id} is well "
        f"({replica.link_reason}): it is placed anew"
    )
    book.effects.append(Happened("replica.unreachable", node.node_id, replica.key, replica.incarnation, reason=reason))
    send_away(book, replica, book.settings.drain_grace_s, reason, now)

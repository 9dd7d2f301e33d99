"""Membership as a state machine: (state, event, now) -> effects. No clock, no socket, no task.

Each public method is one event. It changes the state and returns what is to be done about it. `now` is a monotonic
time in seconds. What a node says of its replicas is in `reports.py`, what operators order in `orders.py`.
"""

from __future__ import annotations

from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh_head.registry import hello as hellos
from stagemesh_head.registry import messages, orders, unreachable
from stagemesh_head.registry.book import Book
from stagemesh_head.registry.effects import CloseSession, Effect, Happened, Send
from stagemesh_head.registry.placement import Placement, Placer
from stagemesh_head.registry.reports import check_reports, take_reports
from stagemesh_head.registry.rows import ReplicaKey
from stagemesh_head.registry.settings import RegistrySettings
from stagemesh_head.registry.state import Node, Replica, StageEntry, StageKey, State, stage_of


class Machine:
    """The registry's rules."""

    def __init__(
        self, stages: dict[StageKey, StageEntry], settings: RegistrySettings, head_epoch: str, now: float
    ) -> None:
        self.state = State(stages)
        self.settings = settings
        self._book = Book(self.state, settings)
        self._head_epoch = head_epoch
        self._started_at = now
        self._hold_until: float | None = None
        """Set once a node tells of an earlier head: until then free slots wait for the nodes of that time."""
        self._last_tick = now

    # -- a node's session ---------------------------------------------------
    def hello(self, session: int, hello: registry_pb.Hello, peer: str, now: float) -> list[Effect]:
        """A node joins, or joins again.

        Raises:
            MeshError: it may not; nothing has changed then.
        """
        if session in self.state.sessions:
            raise invalid("hello", hello.node_id, "was said already in this session")
        hellos.check_form(hello)
        check_reports(hello.running, "hello.running")
        willing = hellos.willing_stages(hello, self.state.stages)
        hellos.check_rivals(hello, self.state.nodes.values(), now, self.settings.lease_s)
        hellos.check_claims(hello, self.state.stages)
        old = self.state.nodes.get(hello.node_id)
        if old is None:
            self._make_room()
        self._note_restart(hello, now)
        node = Node(hello.node_id, hello, peer, willing, joined_at=now, last_heartbeat=now, session=session)
        if old is not None:
            self._succeed(old, node, now)
        self.state.nodes[node.node_id] = node
        self.state.sessions[session] = node
        book = self._book
        book.effects.append(Send(session, messages.welcome(self.settings)))
        is_rejoin = old is not None and old.incarnation == hello.incarnation
        book.node_event("node.rejoined" if is_rejoin else "node.joined", node, f"from {peer}", from_state="")
        orders.recall_scaling(book, hello.scaled, now)
        take_reports(book, node, hello.running, now)
        for replica in node.replicas.values():
            if not replica.incarnation:
                book.send_assignment(replica, node, now)
            elif is_rejoin and replica.drain_reason is not None:
                book.send_revocation(replica, node)
        if node.drain_reason is not None and node.drain_grace_s is not None:
            book.effects.append(Send(session, messages.drain_order(node.drain_grace_s, node.drain_reason)))
        book.republish(node)
        book.has_room_news = True
        return self._finish(now)

    def heartbeat(self, session: int, beat: registry_pb.Heartbeat, now: float) -> list[Effect]:
        """A node renews its lease and reports.

        Raises:
            MeshError: NODE_UNKNOWN or STALE_INCARNATION: the node is to join again; INVALID_REQUEST.
        """
        node = self.state.sessions.get(session)
        if node is None:
            raise MeshError(Reason.NODE_UNKNOWN, "no node has this session: its lease ran out, or it never said hello")
        if beat.incarnation != node.incarnation:
            raise MeshError(
                Reason.STALE_INCARNATION,
                f"heartbeat of incarnation {beat.incarnation!r} in a session of {node.incarnation!r}",
                node=node.node_id,
            )
        if beat.sequence <= node.sequence:
            raise invalid("heartbeat.sequence", beat.sequence, f"must be above {node.sequence}")
        check_reports(beat.replicas, "heartbeat.replicas")
        node.sequence, node.last_heartbeat = beat.sequence, now
        book, before = self._book, node.state
        if node.suspect_reason:
            node.suspect_reason = ""
            book.node_event("node.live", node, "heartbeats are back", from_state=before.name)
            book.has_room_news = True
        if beat.draining and node.drain_reason is None:
            node.drain_reason = "the node drains"
            book.node_event("node.draining", node, node.drain_reason, from_state=before.name)
        take_reports(book, node, beat.replicas, now)
        if node.state is not before:
            book.republish(node)
        for replica in node.replicas.values():
            if not replica.incarnation and now - replica.sent_at > self.settings.lease_s:
                book.send_assignment(replica, node, now)
        scaled = messages.scaled_stages(self.state.stages.values())
        book.effects.append(Send(session, messages.heartbeat_ack(beat.sequence, messages.dial_problems(node), scaled)))
        return self._finish(now)

    def goodbye(self, session: int, reason: str, now: float) -> list[Effect]:
        """A node leaves, and its replicas with it."""
        return self.session_ended(session, reason or "it said goodbye", now, on_purpose=True)

    def session_ended(self, session: int, reason: str, now: float, *, on_purpose: bool) -> list[Effect]:
        """A session is over. `on_purpose`: the node ended it; else it broke, and the lease runs on."""
        node = self.state.sessions.pop(session, None)
        if node is not None:
            node.session = None
            if on_purpose:
                self._node_gone(node, reason, now)
            else:
                self._suspect(node, reason)
        return self._finish(now)

    # -- links and time -----------------------------------------------------
    def link_changed(self, key: ReplicaKey, incarnation: str, up: bool, reason: str, now: float) -> list[Effect]:
        """The head's link to a replica opened or broke. News of an earlier process are old news."""
        replica = self.state.replicas.get(key)
        if replica is not None and replica.incarnation == incarnation and incarnation:
            unreachable.link_changed(self.state.nodes[replica.node_id], replica, up, reason, now)
            self._book.publish(replica)
        return self._finish(now)

    def tick(self, now: float) -> list[Effect]:
        """Look at the leases, every `settings.tick_s`. When it comes much later, this process itself stood still."""
        away = now - self._last_tick - 2 * self.settings.tick_s
        self._last_tick = now
        nodes = list(self.state.present_nodes())
        stalled = away > self.settings.heartbeat_interval_s
        if stalled:
            # Heartbeats wait in the sockets: nobody is late but this process.
            for node in nodes:
                node.last_heartbeat = min(now, node.last_heartbeat + away)
            self._book.effects.append(Happened("head.stalled", "", reason=f"the head stood still for {away:.1f} s"))
        for node in nodes:
            age = now - node.last_heartbeat
            if age >= self.settings.lease_s:
                self._node_gone(node, f"no heartbeat for {age:.1f} s", now)
            elif age >= self.settings.suspect_after_s and not node.suspect_reason:
                self._suspect(node, f"no heartbeat for {age:.1f} s")
        unreachable.replace_unreachable(self._book, now, stalled=stalled)
        if self._hold_until is not None and now >= self._hold_until:
            self._hold_until = None
            self._book.has_room_news = True
        self._forget(now)
        return self._finish(now)

    @property
    def is_holding(self) -> bool:
        """Whether free slots wait for the nodes of before the head's restart."""
        return self._hold_until is not None

    # -- operators ----------------------------------------------------------
    def drain_replica(self, key: ReplicaKey, incarnation: str, grace_s: float, reason: str, now: float) -> list[Effect]:
        """See `orders.drain_replica`."""
        orders.drain_replica(self._book, key, incarnation, grace_s, reason, now)
        return self._finish(now)

    def drain_node(self, node_id: str, grace_s: float, reason: str, now: float) -> list[Effect]:
        """See `orders.drain_node`."""
        orders.drain_node(self._book, node_id, grace_s, reason)
        return self._finish(now)

    def scale_stage(self, pipeline: str, stage: str, replicas: int, now: float) -> tuple[int, list[Effect]]:
        """See `orders.scale_stage`: the target before, and the effects."""
        previous = orders.scale_stage(self._book, pipeline, stage, replicas, now)
        return previous, self._finish(now)

    def pipeline_of(self, pipeline: str) -> str:
        """See `orders.pipeline_of`."""
        return orders.pipeline_of(self._book, pipeline)

    def entry_of(self, pipeline: str, stage: str) -> StageEntry:
        """See `orders.entry_of`."""
        return orders.entry_of(self._book, pipeline, stage)

    # -- inside -------------------------------------------------------------
    def _finish(self, now: float) -> list[Effect]:
        # A replica that moves leaves room behind; each move takes a FAILED one, so that this ends.
        while self._book.has_room_news:
            self._place(now)
        return self._book.take_effects()

    def _make_room(self) -> None:
        """Have a place for one more node; rows of nodes that are gone make room, the oldest first."""
        if len(self.state.nodes) < self.settings.max_nodes:
            return
        gone = [node for node in self.state.nodes.values() if node.gone_at is not None]
        if not gone:
            raise MeshError(Reason.OVERLOADED, f"this head has its {self.settings.max_nodes} nodes already")
        del self.state.nodes[min(gone, key=lambda node: node.gone_at or 0.0).node_id]

    def _note_restart(self, hello: registry_pb.Hello, now: float) -> None:
        """A node that runs something, or knows another head's epoch, proves that this head was restarted."""
        is_old = bool(hello.running) or hello.last_head_epoch not in ("", self._head_epoch)
        until = self._started_at + self.settings.restart_settle_s
        if is_old and self._hold_until is None and now < until:
            self._hold_until = until

    def _succeed(self, old: Node, node: Node, now: float) -> None:
        """`node` takes the place of `old`: the same start in a new session, or a new start."""
        if old.session is not None:
            self.state.sessions.pop(old.session, None)
            error = MeshError(Reason.STALE_INCARNATION, f"node {node.node_id!r} has joined in a newer session")
            self._book.effects.append(CloseSession(old.session, error))
            old.session = None
        if old.incarnation != node.incarnation:
            for replica in list(old.replicas.values()):
                self._book.remove(replica, "its node was started anew", now, is_final=True)
            return
        node.drain_reason, node.drain_grace_s = old.drain_reason, old.drain_grace_s
        node.failed, node.replicas = old.failed, old.replicas
        if old.gone_at is None:
            node.joined_at = old.joined_at

    def _suspect(self, node: Node, reason: str) -> None:
        before, is_new = node.state, not node.suspect_reason
        node.suspect_reason = reason
        if is_new:
            self._book.node_event("node.suspect", node, reason, from_state=before.name)
        self._book.republish(node)

    def _node_gone(self, node: Node, reason: str, now: float) -> None:
        before = node.state
        if node.session is not None:
            self.state.sessions.pop(node.session, None)
            error = MeshError(Reason.NODE_UNKNOWN, f"{reason}: the lease ran out, join again", node=node.node_id)
            self._book.effects.append(CloseSession(node.session, error))
            node.session = None
        node.gone_at, node.suspect_reason = now, ""
        self._book.node_event("node.gone", node, reason, from_state=before.name)
        for replica in list(node.replicas.values()):
            was_told = replica.drain_reason is not None
            self._book.remove(replica, f"node {node.node_id} is gone: {reason}", now, is_final=was_told)
        node.leftovers.clear()

    def _place(self, now: float) -> None:
        """Give free slots to nodes."""
        self._book.has_room_news = False
        placer = Placer(self.state, self.settings.reserved)
        placements = placer.place(only_returns=self.is_holding)
        moves = [] if self.is_holding else placer.move_failed()
        for replica, placement in moves:
            node = self.state.nodes[replica.node_id]
            self._book.evict(replica, node, f"it moves to node {placement.node_id}", now)
            placements.append(placement)
        for placement in placements:
            self._assign(placement, now)

    def _assign(self, placement: Placement, now: float) -> None:
        node = self.state.nodes[placement.node_id]
        entry = self.state.stages[stage_of(placement.key)]
        replica = Replica(placement.key, node.node_id, placement.device_ids, entry.revision, sent_at=now)
        self._book.add(replica, node)
        self._book.send_assignment(replica, node, now)
        self._book.publish(replica)

    def _forget(self, now: float) -> None:
        """Drop what was kept long enough."""
        unreachable.forget_replacements(self.state, now)
        kept = self.settings.gone_rows_s
        for node in list(self.state.nodes.values()):
            if node.gone_at is not None and now - node.gone_at > kept:
                del self.state.nodes[node.node_id]
        while self.state.gone:
            name, row = next(iter(self.state.gone.items()))
            if now - row.at <= kept:
                return
            del self.state.gone[name]

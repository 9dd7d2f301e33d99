"""The registry of a head: runs the membership machine, and carries out what it says.

Everything here runs on the event loop's thread. Events go in, the effects are done in order: messages to sessions, rows
to listeners and followers, events to the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from stagemesh.config import Pipeline
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import header_pb2 as header_pb
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh_head.registry import views
from stagemesh_head.registry.changes import ChangeLog
from stagemesh_head.registry.effects import CloseSession, Effect, Happened, RowChanged, Send
from stagemesh_head.registry.happenings import EventLog
from stagemesh_head.registry.machine import Machine
from stagemesh_head.registry.rows import ReplicaKey, ReplicaRow
from stagemesh_head.registry.session import Session
from stagemesh_head.registry.settings import RegistrySettings
from stagemesh_head.registry.state import stage_entries

log = logging.getLogger(__name__)

RowListener = Callable[[ReplicaKey, ReplicaRow | None], None]
REFUSAL_PERIOD_S, MAX_REFUSALS = 60.0, 1_000
_NAMESPACE = uuid.UUID("6f1a7a6e-6d8b-4b6e-9c1e-57a9e3e5b0f4")


class Registry:
    """Nodes, replicas, and who follows them. Implements `Membership`."""

    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        settings: RegistrySettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.pipelines = tuple(pipelines)
        self.settings = settings or RegistrySettings()
        self.clock = clock
        self.head_epoch = uuid.uuid4().hex
        names = ",".join(sorted(pipeline.name for pipeline in self.pipelines))
        self.mesh_id = self.settings.mesh_id or uuid.uuid5(_NAMESPACE, names).hex[:12]
        self.machine = Machine(stage_entries(self.pipelines), self.settings, self.head_epoch, clock())
        self.changes = ChangeLog()
        self.events = EventLog(wall_clock)
        self._sessions: dict[int, Session] = {}
        self._numbers = count(1)
        self._listeners: list[RowListener] = []
        self._refusals: OrderedDict[str, tuple[Reason, float]] = OrderedDict()
        self._ticker: asyncio.Task[None] | None = None
        self._is_closed = False

    # -- life ---------------------------------------------------------------
    def start(self) -> None:
        """Begin to look at the leases. Needs a running event loop."""
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick(), name="registry leases")

    async def close(self) -> None:
        """End all sessions and watches, so that the server can stop; nodes will look for the next head."""
        self._is_closed = True
        for session in list(self._sessions.values()):
            session.close(MeshError(Reason.UNREACHABLE, "the head stops"))
        self.changes.close()
        self.events.close()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
            self._ticker = None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.settings.tick_s)
            try:
                self.apply(self.machine.tick(self.clock()))
            except Exception:
                # The leases must be looked at again, whatever one look met.
                log.exception("a look at the leases failed")

    # -- Membership ---------------------------------------------------------
    def rows(self) -> Iterable[ReplicaRow]:
        """All rows there are now."""
        return [replica.row for replica in self.machine.state.replicas.values() if replica.row is not None]

    def subscribe(self, listener: RowListener) -> Callable[[], None]:
        """Call `listener` at every change of a row; returns the unsubscriber."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def link_changed(self, key: ReplicaKey, incarnation: str, up: bool, reason: str) -> None:
        """This head's link to a replica opened or broke."""
        self.apply(self.machine.link_changed(key, incarnation, up, reason, self.clock()))

    # -- sessions -----------------------------------------------------------
    def open_session(self, peer: str) -> Session:
        """A Join call begins.

        Raises:
            MeshError: OVERLOADED; UNREACHABLE while the head stops.
        """
        if self._is_closed:
            raise MeshError(Reason.UNREACHABLE, "the head stops")
        if len(self._sessions) >= self.settings.max_sessions:
            raise MeshError(Reason.OVERLOADED, f"{len(self._sessions)} sessions are open already")
        session = Session(next(self._numbers), peer)
        self._sessions[session.number] = session
        return session

    def receive(self, session: Session, message: registry_pb.JoinRequest) -> None:
        """A node's message.

        Raises:
            MeshError: the session ends with it.
        """
        if session.is_closed:
            return
        now, kind = self.clock(), message.WhichOneof("message")
        if kind == "heartbeat":
            self.apply(self.machine.heartbeat(session.number, message.heartbeat, now))
        elif kind == "hello":
            try:
                effects = self.machine.hello(session.number, message.hello, session.peer, now)
            except MeshError as error:
                self._note_refusal(message.hello.node_id[:64], error, now)
                raise
            self.apply(effects)
        elif kind == "goodbye":
            self.apply(self.machine.goodbye(session.number, message.goodbye.reason[:1_000], now))
            session.close(None)
        else:
            raise MeshError(Reason.INVALID_REQUEST, "message: nothing is set: send hello, heartbeat or goodbye")

    def session_ended(self, session: Session, reason: str, *, on_purpose: bool) -> None:
        """The call of a session is over, from whichever side."""
        if self._sessions.pop(session.number, None) is not None:
            session.close(None)
            now = self.clock()
            self.apply(self.machine.session_ended(session.number, reason, now, on_purpose=on_purpose))

    def _note_refusal(self, node_id: str, error: MeshError, now: float) -> None:
        """An event for a refused node; not for each of its tries, which would push all else out of the log."""
        last = self._refusals.pop(node_id, None)
        if last is None or last[0] is not error.reason or now - last[1] >= REFUSAL_PERIOD_S:
            last = (error.reason, now)
            self.apply([Happened("node.refused", node_id, reason=error.message)])
        self._refusals[node_id] = last
        while len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    # -- answers ------------------------------------------------------------
    def header(self, revision: int | None = None) -> header_pb.ResponseHeader:
        """Where an answer comes from."""
        return header_pb.ResponseHeader(
            mesh_id=self.mesh_id,
            head_epoch=self.head_epoch,
            revision=self.changes.revision if revision is None else revision,
        )

    def missing(self) -> list[admin_pb.MissingSlot]:
        """Slots that should have a replica and have none, and why, in words."""
        return views.missing_views(self.machine.state, self.settings.reserved, is_holding=self.machine.is_holding)

    def apply(self, effects: Iterable[Effect]) -> None:
        """Carry out what the machine says."""
        for effect in effects:
            if isinstance(effect, RowChanged):
                self.changes.note(
                    effect.key, effect.incarnation, is_removed=effect.row is None, only_load=effect.only_load
                )
                for listener in list(self._listeners):
                    try:
                        listener(effect.key, effect.row)
                    except Exception:
                        log.exception("a listener failed on %s", effect.key)
            elif isinstance(effect, Send):
                session = self._sessions.get(effect.session)
                if session is not None:
                    if effect.message.HasField("welcome"):
                        effect.message.welcome.header.CopyFrom(self.header())
                    session.send(effect.message)
            elif isinstance(effect, CloseSession):
                session = self._sessions.get(effect.session)
                if session is not None:
                    session.close(effect.error)
            else:
                self.events.add(effect)

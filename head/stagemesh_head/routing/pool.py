"""The replicas of one stage: picking and reserving one in a single step, waiting when there is none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh_head.registry.rows import ReplicaRow, ReplicaState
from stagemesh_head.routing.policies import Policy, RouteHint

if TYPE_CHECKING:
    from stagemesh_head.links.link import Link

Tried = tuple[int, str, int]
"""Replica id, incarnation and link session of an attempt that was lost. A link that opened anew may be tried again."""


class Member:
    """One replica as its pool sees it."""

    __slots__ = ("inflight", "last_pick", "link", "replica_id", "row")

    def __init__(self, row: ReplicaRow) -> None:
        self.replica_id = row.key.replica_id
        self.row = row
        self.link: Link | None = None
        self.inflight = 0
        self.last_pick = 0

    @property
    def reported(self) -> int:
        """Tasks, running and waiting, as the replica said last: on its link, or before that through its node."""
        if self.link is not None and self.link.reported is not None:
            return self.link.reported
        load = self.row.load
        return load.running + load.waiting if load is not None else 0

    @property
    def is_eligible(self) -> bool:
        """Whether it takes new tasks."""
        return self.row.state is ReplicaState.READY and self.link is not None and self.link.is_up

    @property
    def identity(self) -> Tried:
        """What an attempt on it is remembered by."""
        return self.replica_id, self.row.incarnation, self.link.session if self.link is not None else 0


class Binding:
    """A task's place on a replica. It counts in the replica's load until it is released, once."""

    __slots__ = ("_member", "identity", "link", "replica_id", "row")

    def __init__(self, member: Member, link: Link) -> None:
        self._member: Member | None = member
        self.link = link
        self.row = member.row
        self.replica_id = member.replica_id
        self.identity = member.identity
        member.inflight += 1

    def release(self) -> None:
        """Give the place back. Raises RuntimeError the second time, since then a count somewhere is wrong."""
        member, self._member = self._member, None
        if member is None:
            raise RuntimeError(f"binding to {self.row.key} was released twice")
        member.inflight -= 1


@dataclass(slots=True)
class Ticket:
    """A wait for a replica."""

    hint: RouteHint
    excluded: Collection[Tried]
    granted: Callable[[Binding], None]
    number: int


class StagePool:
    """All replicas of one stage and who waits for them.

    Waiting is event-driven: `changed` is called whenever a replica or a link changes, and serves the waiters in order.
    """

    def __init__(self, pipeline: str, stage: str, policy: Policy, *, max_waiting: int) -> None:
        self.pipeline = pipeline
        self.stage = stage
        self._policy = policy
        self._max_waiting = max_waiting
        self._members: dict[int, Member] = {}
        self._eligible: list[Member] | None = None
        self._waiting: dict[int, Ticket] = {}
        self._numbers = count(1)
        self.picks = 0
        """How often a replica was found for a task."""
        self.placed_beside = 0
        """Of these, how often not by the policy, but to be where another task of the request is."""

    # -- membership ---------------------------------------------------------
    def update(self, replica_id: int, row: ReplicaRow | None, link: Link | None) -> None:
        """A replica's row or link changed; `None` for a row that is no more."""
        member = self._members.get(replica_id)
        if row is None:
            # Bindings to it keep their member; it only leaves the choice.
            self._members.pop(replica_id, None)
        elif member is None or member.row.incarnation != row.incarnation:
            member = self._members[replica_id] = Member(row)
            member.link = link
        else:
            member.row, member.link = row, link
        self._eligible = None
        self._serve_waiters()

    @property
    def ready(self) -> int:
        """Replicas that take tasks now."""
        return len(self._eligible_members())

    @property
    def waiting(self) -> int:
        """Tasks that wait for a replica."""
        return len(self._waiting)

    @property
    def inflight(self) -> int:
        """Tasks bound to the replicas that are members now."""
        return sum(member.inflight for member in self._members.values())

    def members(self) -> list[Member]:
        """By replica id."""
        return [self._members[replica_id] for replica_id in sorted(self._members)]

    def _eligible_members(self) -> list[Member]:
        if self._eligible is None:
            self._eligible = [member for member in self.members() if member.is_eligible]
        return self._eligible

    # -- picking ------------------------------------------------------------
    def pick(self, hint: RouteHint, excluded: Collection[Tried] = (), beside: Tried | None = None) -> Binding | None:
        """Choose a replica and reserve a place on it, or None when none can take the task now.

        Args:
            beside: the replica to take, whatever the policy says, if it takes tasks.
        """
        eligible = self._eligible_members()
        if excluded:
            lost = {identity[0] for identity in excluded}
            eligible = [member for member in eligible if member.identity not in excluded]
            # A replica whose link came back after a loss is a last resort.
            eligible = [member for member in eligible if member.replica_id not in lost] or eligible
        if not eligible:
            return None
        member = next((one for one in eligible if one.identity == beside), None)
        if member is not None:
            self.placed_beside += 1
        else:
            chosen = self._policy.choose(eligible, hint)
            assert isinstance(chosen, Member)
            member = chosen
        assert member.link is not None
        self.picks += 1
        member.last_pick = self.picks
        return Binding(member, member.link)

    def wait(self, hint: RouteHint, excluded: Collection[Tried], granted: Callable[[Binding], None]) -> Ticket:
        """Have `granted` called with a binding as soon as a replica can take the task; first come, first served.

        The caller watches the time, and calls `leave` when it no longer waits.

        Raises:
            MeshError: OVERLOADED, as many wait as may.
        """
        if len(self._waiting) >= self._max_waiting:
            raise MeshError(
                Reason.OVERLOADED,
                f"stage {self.stage!r}: no replica is ready and {self._max_waiting} tasks wait already",
                stage=self.stage,
                limit=self._max_waiting,
            )
        ticket = Ticket(hint, excluded, granted, next(self._numbers))
        self._waiting[ticket.number] = ticket
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Wait no longer. Nothing happens when the ticket was served."""
        self._waiting.pop(ticket.number, None)

    def _serve_waiters(self) -> None:
        if not self._waiting or not self._eligible_members():
            return
        for ticket in list(self._waiting.values()):
            if ticket.number not in self._waiting:
                continue  # an earlier grant made it leave
            binding = self.pick(ticket.hint, ticket.excluded)
            if binding is not None:
                del self._waiting[ticket.number]
                ticket.granted(binding)

    # -- for people ---------------------------------------------------------
    def missing(self) -> MeshError:
        """The error of a wait that ran out of time, saying what there is."""
        states = [f"replica {m.replica_id} is {_state_of(m)}" for m in self.members()]
        detail = "; ".join(states) if states else "no node serves it"
        return MeshError(
            Reason.NO_LIVE_REPLICA,
            f"stage {self.stage!r} of pipeline {self.pipeline!r} has no ready replica: {detail}",
            stage=self.stage,
            pipeline=self.pipeline,
        )


def _state_of(member: Member) -> str:
    state = member.row.state.name.lower()
    if member.row.state is ReplicaState.READY and not member.is_eligible:
        state = "ready, but this head has no link to it"
    return f"{state} ({member.row.reason})" if member.row.reason else state

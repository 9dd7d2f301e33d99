"""Who runs what: fills the slots that have no replica, by need, and says why a slot stays empty.

Pure: it looks at the state and returns placements; the machine makes replicas of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh_head.registry.devices import NoRoom, choose_devices
from stagemesh_head.registry.rows import ReplicaKey, ReplicaState
from stagemesh_head.registry.state import Node, NodeState, Replica, StageEntry, StageKey, State, stage_of

Reserved = Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Placement:
    """Give a slot to a node."""

    key: ReplicaKey
    node_id: str
    device_ids: tuple[str, ...]


@dataclass(slots=True)
class _Room:
    """One node as placement fills it."""

    node: Node
    occupancy: dict[str, list[StageKey]]
    count: int
    per_stage: dict[StageKey, int]
    full_for: set[StageKey] = field(default_factory=set)
    """Stages it was found to have no room for. Room only shrinks within one round."""

    @property
    def named(self) -> StageKey | None:
        """The stage it was started for, when that is just one."""
        return next(iter(self.node.willing)) if self.node.hello.stages and len(self.node.willing) == 1 else None


class Placer:
    """One round of placement."""

    def __init__(self, state: State, reserved: Reserved) -> None:
        self._state = state
        self._reserved = reserved
        self._rooms = {node.node_id: room_of(node, state) for node in state.present_nodes() if _takes_replicas(node)}
        self._taken: dict[StageKey, set[int]] = {key: set() for key in state.stages}
        for key in state.replicas:
            self._taken[stage_of(key)].add(key.replica_id)
        self._placements: list[Placement] = []

    def place(self, *, only_returns: bool = False) -> list[Placement]:
        """Fill what can be filled, in the order in which it should be assigned.

        Args:
            only_returns: fill only slots that go back to the node that had them.
        """
        if self._rooms:
            self._return_to_old_nodes()
            if not only_returns:
                self._fill_by_need()
                self._bring_extras()
        return list(self._placements)

    def move_failed(self) -> list[tuple[Replica, Placement]]:
        """Other nodes for replicas that FAILED where they are, though their configuration may be good."""
        moves = []
        for replica in self._state.replicas.values():
            if replica.reported is not ReplicaState.FAILED or replica.drain_reason is not None or is_hopeless(replica):
                continue
            entry = self._state.stages[stage_of(replica.key)]
            found = self._find(entry, replica.key.replica_id, skip=replica.node_id)
            if found is not None:
                self._commit(found)
                moves.append((replica, found))
        return moves

    # -- the three rounds ---------------------------------------------------
    def _return_to_old_nodes(self) -> None:
        for key, entry in self._state.stages.items():
            for replica_id in self._free_ids(entry):
                slot = key.slot(replica_id)
                node_id, device_ids = self._state.memory.get(slot, ("", ()))
                room = self._rooms.get(node_id)
                if room is not None and self._may_take(room, entry, replica_id):
                    self._try(room, entry, replica_id, device_ids)

    def _fill_by_need(self) -> None:
        stuck: set[StageKey] = set()
        while True:
            needy = [
                (self._need(entry), order, entry)
                for order, (key, entry) in enumerate(self._state.stages.items())
                if key not in stuck and self._has_free_id(entry)
            ]
            if not needy:
                return
            entry = min(needy, key=lambda item: item[:2])[2]
            if not self._place_one(entry):
                stuck.add(entry.key)

    def _bring_extras(self) -> None:
        """A node started for one stage with a number of replicas gets that many, also beyond the target."""
        for room in self._rooms.values():
            key = room.named
            if key is None or room.node.hello.max_replicas == 0 or self._state.stages[key].is_scaled:
                continue
            entry = self._state.stages[key]
            while room.count < room.node.hello.max_replicas:
                taken = self._taken[key]
                replica_id = next(i for i in range(entry.target, entry.target + len(taken) + 1) if i not in taken)
                if not self._may_take(room, entry, replica_id) or not self._try(room, entry, replica_id, ()):
                    break

    # -- one slot -----------------------------------------------------------
    def _place_one(self, entry: StageEntry) -> bool:
        """Fill the lowest free slot that some node has room for."""
        barred = self._reserved.get(entry.key, 0)
        tried_reserved = False
        for replica_id in self._free_ids(entry):
            # All reserved slots are alike, and so are all others: the first of a kind speaks for the rest.
            if replica_id < barred:
                if tried_reserved:
                    continue
                tried_reserved = True
            found = self._find(entry, replica_id)
            if found is not None:
                self._commit(found)
                return True
            if replica_id >= barred:
                return False
        return False

    def _find(self, entry: StageEntry, replica_id: int, skip: str = "") -> Placement | None:
        rooms = [
            room
            for room in self._rooms.values()
            if room.node.node_id != skip and self._may_take(room, entry, replica_id)
        ]
        # Nodes whose replicas the head reaches come first. Those started for the stage keep `any` nodes free for
        # others; then spread over nodes, emptiest first.
        rooms.sort(
            key=lambda room: (
                bool(room.node.unreached),
                not room.node.hello.stages,
                room.per_stage.get(entry.key, 0),
                room.count - len(room.node.hello.devices),
                room.node.node_id,
            )
        )
        for room in rooms:
            devices = self._choose(room, entry, replica_id, ())
            if not isinstance(devices, NoRoom):
                return Placement(entry.key.slot(replica_id), room.node.node_id, devices)
        return None

    def _try(self, room: _Room, entry: StageEntry, replica_id: int, remembered: tuple[str, ...]) -> bool:
        devices = self._choose(room, entry, replica_id, remembered)
        if isinstance(devices, NoRoom):
            return False
        self._commit(Placement(entry.key.slot(replica_id), room.node.node_id, devices))
        return True

    def _choose(
        self, room: _Room, entry: StageEntry, replica_id: int, remembered: tuple[str, ...]
    ) -> tuple[str, ...] | NoRoom:
        devices = devices_in(room, entry, replica_id, self._state, remembered)
        if isinstance(devices, NoRoom):
            room.full_for.add(entry.key)
        return devices

    def _may_take(self, room: _Room, entry: StageEntry, replica_id: int) -> bool:
        return entry.key not in room.full_for and refusal(room, entry, replica_id, self._reserved) is None

    def _commit(self, placement: Placement) -> None:
        room, stage = self._rooms[placement.node_id], stage_of(placement.key)
        room.count += 1
        room.per_stage[stage] = room.per_stage.get(stage, 0) + 1
        for device_id in placement.device_ids:
            room.occupancy.setdefault(device_id, []).append(stage)
        self._taken[stage].add(placement.key.replica_id)
        self._placements.append(placement)

    def _need(self, entry: StageEntry) -> tuple[int, int]:
        """Smallest first: stages without any replica, then those furthest below their target."""
        taken = len(self._taken[entry.key])
        return (1, taken - entry.target) if taken else (0, 0)

    def _has_free_id(self, entry: StageEntry) -> bool:
        return next(self._free_ids(entry), None) is not None

    def _free_ids(self, entry: StageEntry) -> Iterator[int]:
        taken = self._taken[entry.key]
        return (replica_id for replica_id in range(entry.target) if replica_id not in taken)


def missing_slots(state: State, reserved: Reserved) -> list[tuple[ReplicaKey, str]]:
    """Slots that should have a replica and have none, and why."""
    rooms = [room_of(node, state) for node in state.present_nodes()]
    missing = []
    for key, entry in state.stages.items():
        free = [i for i in range(entry.target) if key.slot(i) not in state.replicas]
        reasons: dict[bool, str] = {}
        for replica_id in free:
            is_reserved = replica_id < reserved.get(key, 0)
            if is_reserved not in reasons:
                reasons[is_reserved] = _why_missing(rooms, entry, replica_id, state, reserved)
            missing.append((key.slot(replica_id), reasons[is_reserved]))
    return missing


def room_of(node: Node, state: State) -> _Room:
    """A node's devices and who is on them."""
    occupancy: dict[str, list[StageKey]] = {}
    per_stage: dict[StageKey, int] = {}
    for replica in node.replicas.values():
        stage = stage_of(replica.key)
        per_stage[stage] = per_stage.get(stage, 0) + 1
        if replica.reported is ReplicaState.FAILED:
            continue  # no process of it is left
        for device_id in replica.device_ids:
            occupancy.setdefault(device_id, []).append(stage)
    for (key, _), leftover in node.leftovers.items():
        for device_id in leftover.device_ids:
            occupancy.setdefault(device_id, []).append(stage_of(key))
    return _Room(node, occupancy, len(node.replicas), per_stage)


def devices_in(
    room: _Room, entry: StageEntry, replica_id: int, state: State, remembered: tuple[str, ...] = ()
) -> tuple[str, ...] | NoRoom:
    """Devices for a replica in what is left of a node."""
    copies = room.node.hello.max_replicas if room.named and room.node.hello.max_replicas else entry.target
    return choose_devices(
        entry,
        replica_id,
        room.node.hello.devices,
        room.occupancy,
        state.stages,
        copies=copies,
        remembered=remembered,
    )


def refusal(room: _Room, entry: StageEntry, replica_id: int, reserved: Reserved) -> str | None:
    """Why a node may not take a slot, devices apart; None when it may."""
    node = room.node
    if entry.key not in node.willing:
        return f"serves {', '.join(sorted(key.stage for key in node.willing))} only"
    if node.state is not NodeState.LIVE:
        return f"is {node.state.name.lower()}"
    if replica_id < reserved.get(entry.key, 0) and not node.is_local:
        return "is not the local node, which the slot is reserved for"
    if node.hello.max_replicas and room.count >= node.hello.max_replicas:
        return f"runs {room.count} replicas, its limit"
    slot = entry.key.slot(replica_id)
    if any(key == slot for key, _ in node.leftovers):
        return "still stops an earlier process of it"
    if slot in node.failed:
        return "failed to run it"
    return None


def is_hopeless(replica: Replica) -> bool:
    """Whether a FAILED replica would fail elsewhere too, since the engine refuses its configuration."""
    return replica.error is not None and MeshError.from_status(replica.error).reason is Reason.BAD_STAGE_CONFIG


def _takes_replicas(node: Node) -> bool:
    return node.state is NodeState.LIVE


def _why_missing(rooms: list[_Room], entry: StageEntry, replica_id: int, state: State, reserved: Reserved) -> str:
    """One sentence; the nodes that come closest are named, at most three."""
    serving = [room for room in rooms if entry.key in room.node.willing]
    if not serving:
        return f"no node serves stage {entry.key.stage!r}"
    reasons = []
    for room in serving:
        why = refusal(room, entry, replica_id, reserved)
        if why is None:
            devices = devices_in(room, entry, replica_id, state)
            why = devices.why if isinstance(devices, NoRoom) else "has room and gets it next"
        reasons.append(f"node {room.node.node_id} {why}")
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return "; ".join(reasons[:3]) + more

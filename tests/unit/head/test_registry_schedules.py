"""Whatever happens, in whatever order: the invariants of membership under thousands of random schedules."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from registry_harness import FakeNode, World, pipeline, stage

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_head.registry.rows import ReplicaKey, ReplicaState
from stagemesh_head.registry.settings import SUSPECT_AFTER_INTERVALS
from stagemesh_head.registry.state import NodeState, StageKey, stage_of
from stagemesh_head.registry.unreachable import MAX_DOUBLINGS
from stagemesh_head.registry.views import missing_views

PIPELINES = (
    pipeline(stage("writer", 1, shared_devices=True), stage("painter", 2), stage("voice", 0)),
    pipeline(stage("writer", 1, shared_devices=True), stage("painter", 3, engine_args={"seed": 1})),
)
"""The second is what a head may find in the edited file when it is restarted."""


class Schedule:
    """Some nodes, and what may happen to them. `number` chooses among whatever an action has to choose from."""

    def __init__(self) -> None:
        self.world = World(PIPELINES[0], reserved={("shapes", "writer"): 1}, gone_rows_s=30.0, link_timeout_s=2.0)
        for node_id, devices, options in (
            ("a", 2, {"labels": {"stagemesh.local": "true"}}),
            ("b", 2, {}),
            ("c", 1, {"stages": ["painter"], "max_replicas": 1}),
            ("b", 2, {}),  # somebody started a second one by mistake
        ):
            self.world.node(node_id, devices, **options)
        self.old_sessions: list[tuple[FakeNode, int, str]] = []
        self.ended: set[tuple[ReplicaKey, str]] = set()
        self._incarnations = 0

    def _node(self, number: int) -> FakeNode:
        return self.world.nodes[number % len(self.world.nodes)]

    def _replica(self, node: FakeNode, number: int) -> ReplicaKey | None:
        keys = sorted(node.running)
        return keys[number // 7 % len(keys)] if keys else None

    # -- actions ------------------------------------------------------------
    def join(self, number: int) -> None:
        node = self._node(number)
        session = node.session
        try:
            node.join()
        except MeshError as error:
            assert error.reason is Reason.NODE_REFUSED, error
            return
        if session is not None:
            self.old_sessions.append((node, session, node.incarnation))

    def beat(self, number: int) -> None:
        node = self._node(number)
        if node.session is not None:
            try:
                node.beat()
            except MeshError as error:
                assert error.reason in (Reason.NODE_UNKNOWN, Reason.STALE_INCARNATION), error
                node.session = None

    def all_beat(self, number: int) -> None:
        for index in range(len(self.world.nodes)):
            self.beat(index)

    def live_on(self, number: int) -> None:
        """Some time in which all nodes are well."""
        for _ in range(1 + number % 6):
            self.world.tick(1.0)
            self.all_beat(number)

    def progress(self, number: int) -> None:
        """Replicas of a node go on: what starts gets ready, what drains ends."""
        for key, report in list(self._node(number).running.items()):
            if report.state == replica_pb.REPLICA_STATE_STARTING:
                self._node(number).set(ReplicaState.READY, key)
            elif report.state == replica_pb.REPLICA_STATE_DRAINING:
                self._end(self._node(number), key, number)

    def _end(self, node: FakeNode, key: ReplicaKey, number: int) -> None:
        if number % 2:
            node.set(ReplicaState.GONE, key)
        else:
            del node.running[key]

    def replica_restarts(self, number: int) -> None:
        node = self._node(number)
        key = self._replica(node, number)
        over = (replica_pb.REPLICA_STATE_GONE, replica_pb.REPLICA_STATE_FAILED)
        if key is not None and node.running[key].state not in over:
            self._incarnations += 1
            node.running[key].replica.CopyFrom(key.ref(f"again-{self._incarnations}"))
            node.set(ReplicaState.STARTING, key)

    def replica_fails(self, number: int) -> None:
        node = self._node(number)
        key = self._replica(node, number)
        if key is not None:
            node.set(ReplicaState.FAILED, key, error=MeshError(Reason.START_FAILED, "boom").to_status())

    def replica_ends(self, number: int) -> None:
        node = self._node(number)
        key = self._replica(node, number)
        if key is not None:
            self._end(node, key, number)

    def replica_is_stuck(self, number: int) -> None:
        node = self._node(number)
        key = self._replica(node, number)
        if key is not None and node.running[key].state == replica_pb.REPLICA_STATE_READY:
            node.set(ReplicaState.SUSPECT, key)

    def crash(self, number: int) -> None:
        self._node(number).crash()

    def disconnect(self, number: int) -> None:
        node = self._node(number)
        if node.session is not None:
            self.old_sessions.append((node, node.session, node.incarnation))
        node.disconnect()

    def leave(self, number: int) -> None:
        if self._node(number).session is not None:
            self._node(number).leave()

    def wait_a_moment(self, number: int) -> None:
        self.world.tick(0.5 + number % 4)

    def wait_long(self, number: int) -> None:
        self.world.tick(4.0 + number % 12)

    def head_restarts(self, number: int) -> None:
        self.world.pipelines = (PIPELINES[number % len(PIPELINES)],)
        self.world.restart_head()
        self.old_sessions.clear()
        self.ended.clear()

    def link_changes(self, number: int) -> None:
        rows = [row for row in self.world.rows.values() if row.endpoint]
        if rows:
            self.world.link(rows[number // 2 % len(rows)], up=bool(number % 2))

    def late_news(self, number: int) -> None:
        """A message of a session that is over."""
        if not self.old_sessions:
            return
        node, session, incarnation = self.old_sessions[number % len(self.old_sessions)]
        if session in self.world.machine.state.sessions:
            return
        before = dict(self.world.rows)
        current, node.session = node.session, session
        try:
            node.beat(incarnation=incarnation)
        except MeshError as error:
            assert error.reason is Reason.NODE_UNKNOWN
        else:
            raise AssertionError("a heartbeat in a closed session was taken")
        finally:
            node.session = current
        self.world.do(self.world.machine.session_ended(session, "late", self.world.now, on_purpose=bool(number % 2)))
        assert self.world.rows == before

    def drain_replica(self, number: int) -> None:
        keys = sorted(self.world.rows)
        if keys:
            key = keys[number % len(keys)]
            self.world.do(self.world.machine.drain_replica(key, "", 5.0, "test", self.world.now))

    def drain_node(self, number: int) -> None:
        nodes = [node.node_id for node in self.world.machine.state.present_nodes()]
        if nodes:
            self.world.do(self.world.machine.drain_node(nodes[number % len(nodes)], 5.0, "test", self.world.now))

    def scale(self, number: int) -> None:
        stages = list(self.world.machine.state.stages)
        key = stages[number % len(stages)]
        _, effects = self.world.machine.scale_stage(key.pipeline, key.stage, number // 5 % 4, self.world.now)
        self.world.do(effects)

    # -- invariants -----------------------------------------------------------
    def check(self) -> None:
        self.ended |= {name for name, row in self.world.machine.state.gone.items() if row.is_final and name[1]}
        self.check_owners()
        self.check_ready()
        self.check_links()
        self.check_devices()
        self.check_nothing_is_forgotten()

    def check_owners(self) -> None:
        """One owner per slot, known to both sides; rows are what was told."""
        state = self.world.machine.state
        owned = [replica for node in state.nodes.values() for replica in node.replicas.values()]
        assert {replica.key for replica in owned} == set(state.replicas) and len(owned) == len(state.replicas)
        for node in state.nodes.values():
            assert all(replica.node_id == node.node_id for replica in node.replicas.values())
            assert node.gone_at is None or not (node.replicas or node.leftovers or node.session)
        assert self.world.rows == {key: replica.row for key, replica in state.replicas.items()}
        open_sessions = {node.session: node for node in state.nodes.values() if node.session is not None}
        assert open_sessions == state.sessions

    def check_ready(self) -> None:
        """READY: a live lease, no broken link, the node says so, nobody ordered it away, and it was never over."""
        state, world = self.world.machine.state, self.world
        for key, row in world.rows.items():
            replica, node = state.replicas[key], state.nodes[row.node_id]
            assert (key, row.incarnation) not in self.ended, f"{key} was resurrected"
            if row.state is ReplicaState.READY:
                assert node.state is NodeState.LIVE and node.session is not None
                late_s = SUSPECT_AFTER_INTERVALS * world.settings.heartbeat_interval_s + world.settings.tick_s
                assert world.now - node.last_heartbeat <= late_s
                assert replica.link_up is not False and replica.drain_reason is None
                assert replica.reported is ReplicaState.READY and row.endpoint

    def check_links(self) -> None:
        """A replica that only the head cannot reach is replaced: not too soon, not much later, ever more rarely."""
        world, state = self.world, self.world.machine.state
        patience_s, slack_s = world.settings.unreachable_after_s, 2 * world.settings.tick_s
        last: dict[ReplicaKey, float] = {}
        for key, waited_s, at in world.waits:
            assert waited_s >= patience_s - 1e-6
            assert key not in last or at - last[key] >= 2 * patience_s - 1e-6
            last[key] = at
        for key, since in world.cut_off.items():
            times, _ = state.replacements.get(key, (0, 0.0))
            assert world.now - since <= patience_s * 2.0 ** min(times, MAX_DOUBLINGS) + slack_s, key

    def check_devices(self) -> None:
        """No device twice, unless the pipeline says so."""
        state = self.world.machine.state

        def is_shared(key: StageKey) -> bool:
            return key in state.stages and state.stages[key].config.runtime.shared_devices

        for node in state.nodes.values():
            holders: dict[str, list[ReplicaKey]] = {}
            for replica in node.replicas.values():
                if replica.reported is not ReplicaState.FAILED:
                    for device_id in replica.device_ids:
                        holders.setdefault(device_id, []).append(replica.key)
            for (key, _), leftover in node.leftovers.items():
                for device_id in leftover.device_ids:
                    holders.setdefault(device_id, []).append(key)
            for keys in holders.values():
                stages = [stage_of(key) for key in keys]
                exclusive = [s for s in stages if not is_shared(s)]
                assert len(set(stages)) == len(stages) and len(exclusive) <= 1, keys

    def check_nothing_is_forgotten(self) -> None:
        """A slot that could be filled is filled; every other has a reason."""
        world, state = self.world, self.world.machine.state
        missing = missing_views(state, world.settings.reserved, is_holding=world.machine.is_holding)
        wanted = {key.slot(i) for key, entry in state.stages.items() for i in range(entry.target)}
        found = {ReplicaKey(m.replica.pipeline, m.replica.stage, m.replica.replica_id) for m in missing}
        assert found == wanted - set(state.replicas)
        if not world.machine.is_holding:
            assert not [slot for slot in missing if "has room" in slot.reason]
        kept_s = world.settings.gone_rows_s + 20.0
        assert all(world.now - row.at <= kept_s for row in state.gone.values())
        assert len(state.nodes) <= 3


ACTIONS = [
    *("join", "beat", "all_beat", "live_on", "progress", "wait_a_moment") * 2,
    *("replica_restarts", "replica_fails", "replica_ends", "replica_is_stuck", "link_changes"),
    *("crash", "disconnect", "leave", "wait_long", "head_restarts", "late_news"),
    *("drain_replica", "drain_node", "scale"),
]


@settings(max_examples=1_000, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 255)), min_size=10, max_size=60))
def test_invariants_hold_under_any_schedule(steps: list[tuple[str, int]]) -> None:
    schedule = Schedule()
    for node in range(3):
        schedule.join(node)
    schedule.check()
    for action, number in steps:
        getattr(schedule, action)(number)
        schedule.check()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 255)), max_size=40))
def test_the_mesh_recovers_from_any_schedule(steps: list[tuple[str, int]]) -> None:
    schedule = Schedule()
    for action, number in steps:
        getattr(schedule, action)(number)
    # Now everything works: fresh nodes, an operator who wants two painters, and time.
    world = schedule.world
    for node in world.nodes:
        node.crash()
    world.tick(12.0)
    for key in list(world.machine.state.stages):
        world.do(
            world.machine.scale_stage(
                key.pipeline, key.stage, {"writer": 1, "painter": 2}.get(key.stage, 0), world.now
            )[1]
        )
    healthy = world.nodes[:3]
    for node in healthy:
        node.join()
    for _ in range(30):
        world.tick(1.0)
        for index, node in enumerate(healthy):
            schedule.progress(index)
            node.beat()
    assert world.states() == {"painter/0": "READY", "painter/1": "READY", "writer/0": "READY"}
    schedule.check()

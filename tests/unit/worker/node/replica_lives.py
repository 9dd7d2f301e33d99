"""Lives of replicas for tests, without processes, at the moments from which the tests go on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from google.protobuf import duration_pb2

from stagemesh.v1 import device_pb2 as device_pb
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_worker.node.lifecycle import LifeLimits, Place, ReplicaLife
from stagemesh_worker.node.orders import Order
from stagemesh_worker.node.restarts import RestartPolicy
from stagemesh_worker.replica import control

STARTING, READY, SUSPECT = (
    replica_pb.REPLICA_STATE_STARTING,
    replica_pb.REPLICA_STATE_READY,
    replica_pb.REPLICA_STATE_SUSPECT,
)
DRAINING, FAILED, GONE = (
    replica_pb.REPLICA_STATE_DRAINING,
    replica_pb.REPLICA_STATE_FAILED,
    replica_pb.REPLICA_STATE_GONE,
)
STAGE = {"name": "writer", "runtime": {"stuck_after": 20.0}}
LIMITS = LifeLimits()


def assignment() -> registry_pb.Assignment:
    return registry_pb.Assignment(
        replica=replica_pb.ReplicaRef(pipeline="shapes", stage="writer", replica_id=1),
        pipeline_revision="r1",
        devices=[device_pb.Device(id="cpu:1", kind=device_pb.DEVICE_KIND_CPU, cores=[1])],
        stage_config_json="{}",
        start_timeout=duration_pb2.Duration(seconds=100),
    )


def new_life(**options: object) -> ReplicaLife:
    numbers = itertools.count(1)
    options.setdefault("policy", RestartPolicy(jitter=lambda: 1.0))
    return ReplicaLife(
        assignment(),
        STAGE,
        Place("127.0.0.1", "10.0.0.5", "host"),
        new_incarnation=lambda: f"i{next(numbers)}",
        **options,  # type: ignore[arg-type]
    )


def started(now: float = 0.0) -> ReplicaLife:
    life = new_life()
    life.begin()
    life.locked(now)
    life.spawned(77, now)
    return life


def serving(now: float = 0.0) -> ReplicaLife:
    life = started(now)
    life.heard(control.Ready("10.0.0.5:4000"), now)
    return life


def kinds(orders: Sequence[Order]) -> list[type]:
    return [type(order) for order in orders]


def first_line(life: ReplicaLife) -> str:
    assert life.error is not None
    return life.error.message.partition("\n")[0]

"""The replicas of a node, as real processes with the synthetic engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from node_harness import assignment, eventually, revocation, supervisor

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.tensors import segments
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh_worker.node.lifecycle import LifeLimits
from stagemesh_worker.node.supervisor import Supervisor

READY, SUSPECT = replica_pb.REPLICA_STATE_READY, replica_pb.REPLICA_STATE_SUSPECT
DRAINING, FAILED, GONE = (
    replica_pb.REPLICA_STATE_DRAINING,
    replica_pb.REPLICA_STATE_FAILED,
    replica_pb.REPLICA_STATE_GONE,
)


def only(own: Supervisor) -> replica_pb.ReplicaReport:
    [report] = own.reports()
    return report


async def until(own: Supervisor, state: replica_pb.ReplicaState.ValueType) -> replica_pb.ReplicaReport:
    await eventually(lambda: [report for report in own.reports() if report.state == state])
    return only(own)


async def test_an_assignment_becomes_a_replica_that_serves_on_its_own_core(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as (own, _):
        own.assign(assignment())
        report = await until(own, READY)
        assert report.endpoint.startswith("127.0.0.1:")
        assert report.pipeline_revision == "r1"
        assert psutil.Process(report.pid).cpu_affinity() == [0]
        assert own.is_ready
        await eventually(lambda: only(own).load.memory_bytes > 1 << 20)
        own.assign(assignment())
        assert only(own).replica.incarnation == report.replica.incarnation, "the same again is the same"
        process = psutil.Process(report.pid)
    assert not process.is_running()


async def test_a_killed_replica_is_started_again_and_leaves_nothing(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as (own, _):
        own.assign(assignment())
        first = await until(own, READY)
        os.kill(first.pid, signal.SIGKILL)
        again = await eventually(lambda: [r for r in own.reports() if r.state == READY and r.restarts == 1])
        assert again[0].replica.incarnation != first.replica.incarnation
        assert again[0].pid != first.pid
        assert segments.names_of(first.pid) == []


async def test_a_stopped_replica_is_suspect_heals_and_is_replaced_when_it_stays_stopped(tmp_path: Path) -> None:
    async with supervisor(tmp_path, LifeLimits(silent_s=1.5)) as (own, _):
        own.assign(assignment(runtime='{"stuck_after": 4.0}'))
        first = await until(own, READY)
        os.kill(first.pid, signal.SIGSTOP)
        suspect = await until(own, SUSPECT)
        assert "has not answered for 1.5 s" in suspect.error.message
        assert not own.is_ready
        os.kill(first.pid, signal.SIGCONT)
        healed = await until(own, READY)
        assert healed.replica.incarnation == first.replica.incarnation
        os.kill(first.pid, signal.SIGSTOP)
        again = await eventually(lambda: [r for r in own.reports() if r.state == READY and r.restarts == 1])
        assert again[0].pid != first.pid


async def test_a_revoked_replica_is_reported_as_gone_until_that_is_known(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as (own, _):
        own.assign(assignment())
        report = await until(own, READY)
        own.revoke(revocation(incarnation="an earlier one"))
        assert only(own).state == READY, "that incarnation is gone already"
        own.revoke(revocation(grace_s=5.0, incarnation=report.replica.incarnation))
        assert only(own).state == DRAINING
        gone = await until(own, GONE)
        assert own.empty.is_set()
        own.forget_gone([gone])
        assert own.reports() == []


async def test_a_slot_that_is_assigned_while_it_ends_begins_anew_afterwards(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as (own, _):
        own.assign(assignment())
        first = await until(own, READY)
        own.revoke(revocation(grace_s=5.0))
        own.assign(assignment())
        again = await eventually(lambda: [r for r in own.reports() if r.state == READY and r.pid != first.pid])
        assert again[0].restarts == 0, "a new assignment, with a clean record"


async def test_another_assignment_for_a_slot_replaces_what_runs_in_it(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as (own, _):
        own.assign(assignment())
        first = await until(own, READY)
        changed = assignment()
        changed.pipeline_revision = "r2"
        own.assign(changed)
        again = await eventually(lambda: [r for r in own.reports() if r.state == READY and r.pid != first.pid])
        assert again[0].pipeline_revision == "r2"


async def test_an_option_that_the_engine_does_not_know_fails_at_once(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as (own, lines):
        own.assign(assignment(engine_args='{"token_per_second": 1}'))
        report = await until(own, FAILED)
        error = MeshError.from_status(report.error)
        assert error.reason is Reason.BAD_STAGE_CONFIG
        assert "tokens_per_second" in error.message
        assert report.restarts == 0
        assert [line for line in lines if line.startswith("writer/0 ") and "tokens_per_second" in line], "its own log"


async def test_a_start_that_crashes_is_given_up_with_its_own_words(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as (own, _):
        own.assign(assignment(engine_args='{"crash_on_start": "no weights here"}'))
        report = await until(own, FAILED)
        assert "no weights here (3 starts in a row failed)" in report.error.message.splitlines()[0]
        assert report.restarts == 2
        own.revoke(revocation())
        await until(own, GONE)


@pytest.mark.parametrize("config", ["{", "[]", '{"runtime": 3}'])
async def test_a_configuration_that_cannot_be_read_is_refused(tmp_path: Path, config: str) -> None:
    async with supervisor(tmp_path) as (own, _):
        broken = assignment()
        broken.stage_config_json = config
        own.assign(broken)
        assert only(own).state == FAILED
        assert "stage_config_json" in only(own).error.message


async def test_a_device_of_another_agent_is_waited_for_and_named(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as (one, _), supervisor(tmp_path) as (other, _):
        one.assign(assignment())
        first = await until(one, READY)
        other.assign(assignment(1))
        await eventually(lambda: f"process {first.pid} (writer/0 of node agent {os.getpid()})" in only(other).phase)
        one.revoke(revocation())
        await until(other, READY)


async def test_a_device_that_stays_taken_fails_the_replica(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as (one, _), supervisor(tmp_path) as (other, _):
        one.assign(assignment())
        await until(one, READY)
        other.assign(assignment(1, start_timeout_s=0.5))
        report = await until(other, FAILED)
        assert "for cpu:0, which process" in report.error.message
        assert only(one).state == READY


async def test_in_a_hurry_everything_ends_soon(tmp_path: Path) -> None:
    async with supervisor(tmp_path, LifeLimits(hurry_s=1.0)) as (own, _):
        own.assign(assignment(0, core=0))
        own.assign(assignment(1, core=1))
        await eventually(lambda: own.is_ready and len(own.reports()) == 2)
        stopped = own.reports()[0].pid
        os.kill(stopped, signal.SIGSTOP)
        own.drain(600.0)
        own.hurry()
        await eventually(own.empty.is_set, 10)
        assert not psutil.pid_exists(stopped)
        own.assign(assignment(2))
        assert own.empty.is_set(), "a node that leaves takes nothing new"

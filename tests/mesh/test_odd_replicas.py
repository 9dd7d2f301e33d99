"""Replicas that say what they should not, and errors of the head's own: one request's trouble is nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_head.orchestration import events as ev
from stagemesh_head.orchestration.machine import RequestMachine
from stagemesh_head.registry.rows import ReplicaState
from tests.mesh.harness import PAINTER, WRITER, cluster, eventually, llm


async def test_columns_of_odd_lengths_and_unknown_slots_do_not_break_the_link(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate()
        task = await writer.next_task()
        slot = task.submit.slot
        for columns in (
            stage_pb.TokenColumns(slots=[slot, 999], counts=[1], token_ids=[1], texts=["a"]),
            stage_pb.TokenColumns(slots=[999], counts=[5], token_ids=[1, 2, 3], texts=["?"]),
            stage_pb.TokenColumns(slots=[slot], counts=[4], token_ids=[2], texts=["b"]),
            stage_pb.TokenColumns(slots=[slot], counts=[], token_ids=[9], texts=[]),
        ):
            writer.send(stage_pb.ExecuteResponse(columns=columns))
        for event in (stage_pb.TaskEvent(slot=slot), stage_pb.TaskEvent(slot=998, aborted=stage_pb.TaskAborted())):
            writer.send(stage_pb.ExecuteResponse(events=[event]))
        task.finish()
        await call.rest()
        assert call.text() == "ab"
        assert call.token_ids() == [1, 2]
        assert writer.links == 1


async def test_a_second_terminal_event_of_a_task_is_dropped(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        first = mesh.generate()
        task = await writer.next_task()
        task.finish()
        task.finish()
        task.fail(MeshError(Reason.STAGE_FAILED))
        await first.rest()
        await mesh.quiet()


async def test_an_abort_that_nobody_asked_for_fails_its_request(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        call = mesh.generate()
        (await writer.next_task()).confirm_abort()
        error = await call.error()
        assert error.reason is Reason.STAGE_FAILED
        assert "aborted" in error.message
        await mesh.quiet()


async def test_an_error_inside_the_head_ends_its_request_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RequestMachine.handle

    def broken(self: RequestMachine, event: ev.Event, now: float) -> list[ev.Command]:
        if self.plan.request_id == "bad" and isinstance(event, ev.Started):
            raise ZeroDivisionError("a mistake of ours")
        return original(self, event, now)

    monkeypatch.setattr(RequestMachine, "handle", broken)
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        calls = {name: mesh.generate(request_id=name) for name in ("bad", "good")}
        tasks = {(t := await writer.next_task()).submit.request_id: t for _ in calls}
        tasks["bad"].started()
        error = await calls["bad"].error()
        assert (error.reason, error.message) == (Reason.INTERNAL, "ZeroDivisionError: a mistake of ours")
        await tasks["bad"].aborted()
        tasks["good"].started()
        tasks["good"].tokens([1], "fine")
        tasks["good"].finish()
        await calls["good"].rest()
        assert calls["good"].text() == "fine"
        await mesh.quiet()


async def test_a_replica_of_an_earlier_start_at_the_same_address_gets_no_tasks(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        mesh.membership.ready("demo", "writer", 0, writer.endpoint, "another-incarnation")
        pool = mesh.gateway.pools.of("demo", "writer")
        await eventually(lambda: pool.ready == 0)
        error = await mesh.generate(timeout=0.4).error()
        assert error.reason is Reason.NO_LIVE_REPLICA
        assert writer.submitted == []


async def test_a_draining_replica_finishes_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER]) as mesh:
        writer = await mesh.add("writer")
        running = mesh.generate()
        task = await writer.next_task()
        mesh.membership.state(mesh.key("writer"), ReplicaState.DRAINING)
        assert (await mesh.generate(timeout=0.3).error()).reason is Reason.NO_LIVE_REPLICA
        task.tokens([1], "to the end")
        task.finish()
        await running.rest()
        assert running.text() == "to the end"
        assert len(writer.submitted) == 1


async def test_a_failed_stage_between_others_names_itself(tmp_path: Path) -> None:
    async with cluster(tmp_path, [WRITER, PAINTER]) as mesh:
        writer, painter = await mesh.add("writer"), await mesh.add("painter")
        call = mesh.generate(sampling=[llm("writer", temperature=0)])
        task = await writer.next_task()
        task.tokens([1], "x")
        task.finish(frame_pb.FINISH_REASON_LENGTH)
        (await painter.next_task()).fail(MeshError(Reason.INVALID_REQUEST, "height: 3: must be a multiple of 8"))
        error = await call.error()
        assert (error.reason, error.metadata["stage"]) == (Reason.INVALID_REQUEST, "painter")
        assert call.text() == "x"

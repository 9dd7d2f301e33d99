"""status, drain, scale, events, health: the operator's commands."""

from __future__ import annotations

import json

import pytest

from tests.unit.cli.conftest import Command


def test_status_shows_stages_replicas_nodes_and_what_is_missing(mesh, command: Command) -> None:  # type: ignore[no-untyped-def]
    mesh()
    ended = command("status", "--requests")
    assert ended.code == 0
    lines = {" ".join(line.split()) for line in ended.out.splitlines()}
    assert "writer/0 ready local cpu:0 127.0.0.1:41234 1 + 0 1,234 300 MiB" in lines
    assert "painter/0 starting local loading weights [restarted 1 ×]" in lines
    assert "painter/1 missing node local has 0 free devices, 1 is needed" in lines
    assert any(line.startswith("local live box 127.0.0.1:5 any writer/0 cpu:0, cpu:1 cpu:1") for line in lines)
    assert "r-1 shapes 2.50 s writer streaming on 0, attempt 2" in lines


def test_status_json_is_whole(mesh, command: Command) -> None:  # type: ignore[no-untyped-def]
    mesh()
    shown = json.loads(command("status", "--json").out)
    assert {"pipelines", "nodes", "replicas", "missing", "requests"} == set(shown)
    assert shown["missing"][0]["replica"]["replica_id"] == 1


@pytest.mark.parametrize(("ready", "code"), [(1, 0), (0, 21)])
def test_status_check_ends_by_whether_every_stage_has_its_replicas(  # type: ignore[no-untyped-def]
    mesh, command: Command, ready: int, code: int
) -> None:
    mesh().ready_writers = ready
    assert command("status", "--check").code == code
    assert command("status").code == 0


def test_drain_replica_waits_until_it_is_gone(mesh, command: Command) -> None:  # type: ignore[no-untyped-def]
    head = mesh()
    ended = command("drain", "replica", "writer/0", "--grace", "5", "--reason", "test")
    assert ended.code == 0 and ended.out.startswith("replica writer/0 is drained, after ")
    (order,) = head.admin.orders
    assert (order.replica.stage, order.replica.replica_id, order.grace.seconds) == ("writer", 0, 5)
    assert order.reason == "test" and order.request_id
    assert head.admin.drained_polls == 0


def test_drain_node_waits_until_it_has_left(mesh, command: Command) -> None:  # type: ignore[no-untyped-def]
    head = mesh()
    ended = command("drain", "node", "local", "--grace", "5")
    assert ended.code == 0 and ended.out.startswith("node local is drained")
    assert head.admin.orders[0].node_id == "local" and head.admin.drained_polls == 0


def test_drain_without_waiting_returns_at_once(mesh, command: Command) -> None:  # type: ignore[no-untyped-def]
    head = mesh()
    assert command("drain", "node", "local", "--no-wait").out == "node local drains\n"
    assert head.admin.drained_polls == 2


def test_drain_of_something_that_is_no_replica_is_a_usage_error(command: Command) -> None:
    assert command("drain", "replica", "writer").code == 2


def test_scale_says_what_changes_and_what_has_no_place(mesh, command: Command) -> None:  # type: ignore[no-untyped-def]
    head = mesh()
    ended = command("scale", "painter", "2")
    assert ended.out.splitlines() == [
        "painter: 1 → 2 replicas",
        "  painter/1 has no place yet: no free device",
    ]
    assert head.admin.orders[0].replicas == 2


def test_events_are_lines_with_reasons(mesh, command: Command) -> None:  # type: ignore[no-untyped-def]
    mesh()
    first, second = command("events", "--past").out.splitlines()
    assert "replica.ready" in first and "writer/0  on local  STARTING → READY: passed its self-probe" in first
    assert "replica.failed" in second


def test_events_end_after_a_count_and_speak_json(mesh, command: Command) -> None:  # type: ignore[no-untyped-def]
    mesh()
    (line,) = command("events", "--json", "-n", "1").out.splitlines()
    assert json.loads(line)["type"] == "replica.ready"


def test_an_unknown_command_is_a_usage_error_with_a_suggestion(command: Command) -> None:
    ended = command("generat")
    assert ended.code == 2 and "generate" in ended.err

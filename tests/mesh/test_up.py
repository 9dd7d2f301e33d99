"""`stagemesh up` as people use it: it serves, says what it waits for, and leaves nothing behind, however it ends."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stagemesh import Client, Finished, Image, StageMeshError, TextDelta
from stagemesh.client.admin import AdminClient
from tests.mesh.processes import (
    READY_S,
    assert_all_gone,
    await_file,
    eventually,
    family,
    start,
    write_pipeline,
)


class Up:
    """A running `stagemesh up`."""

    def __init__(self, folder: Path, pipeline: Path, *arguments: str) -> None:
        self.folder = folder
        self.ready_file = folder / "ready"
        options = ["--listen", "127.0.0.1:0", "--ready-file", str(self.ready_file), *arguments]
        self.process = start(folder, "up", str(pipeline), *options)

    def await_ready(self) -> str:
        address = await_file(self.ready_file, self.process)
        self.family = family(self.process.pid)
        return address

    def finish(self) -> tuple[int, str]:
        return self.process.finish(READY_S)

    def await_output(self, words: str) -> str:
        """The line with these words."""
        return eventually(
            f"it says: {words}", lambda: next((line for line in self.process.output.splitlines() if words in line), "")
        )


@pytest.fixture
def up(tmp_path: Path) -> Iterator[type[Up]]:
    """Starts `stagemesh up`, and ends it for a test that fails half-way."""
    started: list[Up] = []

    class Owned(Up):
        def __init__(self, pipeline: Path, *arguments: str) -> None:
            super().__init__(tmp_path, pipeline, *arguments)
            started.append(self)

    yield Owned  # type: ignore[misc]
    for one in started:
        if not one.process.has_ended:
            one.process.kill()


def test_logs_of_all_processes_are_json_and_name_replica_and_request(up, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    running = up(write_pipeline(tmp_path, pace=20), "--log-json", "--log-level", "debug")
    with Client(running.await_ready()) as client:
        list(client.generate("a wish", request_id="whole"))
        frames = client.generate("a wish", request_id="left", sampling={"writer": {"max_tokens": 2000}})
        next(frames)
        frames.close()
    running.process.signal(signal.SIGTERM)
    code, output = running.finish()
    assert code == 0
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert {record["component"] for record in records} == {"head", "node", "replica"}
    assert all(record["stage"] and record["replica"] == 0 for record in records if record["component"] == "replica")
    ends = {record["request_id"]: record for record in records if record.get("outcome")}
    assert (ends["whole"]["level"], ends["whole"]["outcome"]) == ("debug", "complete")
    assert (ends["left"]["level"], ends["left"]["outcome"]) == ("info", "left")
    assert "writer/0" in ends["left"]["message"]
    told = [record["request_id"] for record in records if record["level"] == "info" and "request_id" in record]
    assert len(told) == len(set(told)), "at most one line a request"
    aborted = [record for record in records if record["component"] == "replica" and record.get("request_id") == "left"]
    assert aborted and aborted[0]["stage"] == "writer"


def test_ctrl_c_lets_a_running_request_end_and_leaves_nothing(up, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    running = up(write_pipeline(tmp_path, pace=20))
    with Client(running.await_ready()) as client:
        frames = client.generate("a wish", sampling={"writer": {"max_tokens": 30}})
        first = next(frames)
        running.process.signal(signal.SIGINT)
        rest = list(frames)
    assert isinstance(first, TextDelta) and isinstance(rest[-1], Finished)
    assert any(isinstance(frame, Image) for frame in rest)
    code, output = running.finish()
    assert code == 0
    assert "1 request runs: draining" in output and "Traceback" not in output
    assert_all_gone(running.family, tmp_path)


def test_a_second_ctrl_c_stops_at_once(up, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    running = up(write_pipeline(tmp_path, pace=1))
    with Client(running.await_ready(), resume_window=0) as client:
        frames = client.generate("a wish", sampling={"writer": {"max_tokens": 500}})
        next(frames)
        running.process.signal(signal.SIGINT)
        running.await_output("draining")
        running.process.signal(signal.SIGINT)
        with pytest.raises(StageMeshError):
            list(frames)
    code, output = running.finish()
    assert code == 0 and "Traceback" not in output
    assert_all_gone(running.family, tmp_path)


def test_kill_9_leaves_nothing(up, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    running = up(write_pipeline(tmp_path))
    running.await_ready()
    assert len(running.family) >= 5, "up, head, node agent and two replicas"
    running.process.kill()
    assert_all_gone(running.family, tmp_path)


def test_ctrl_c_while_it_starts_stops_it(up, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    slow = "name: slow\nstages:\n  - {{name: writer, engine: synthetic, engine_args: {{start_seconds: 300}}}}\n"
    running = up(write_pipeline(tmp_path, text=slow))
    running.await_output("loading")
    everyone = family(running.process.pid)
    running.process.signal(signal.SIGINT)
    code, output = running.finish()
    assert code == 130 and "Traceback" not in output
    assert_all_gone(everyone, tmp_path)


def test_a_mesh_that_is_not_ready_in_time_says_what_it_waited_for_and_leaves_nothing(up, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    slow = "name: slow\nstages:\n  - {{name: writer, engine: synthetic, engine_args: {{start_seconds: 300}}}}\n"
    running = up(write_pipeline(tmp_path, text=slow), "--init-timeout", "5")
    everyone: set[psutil.Process] = set()

    def has_ended() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            everyone.update(family(running.process.pid))
        return running.process.has_ended

    eventually("it gives up", has_ended)
    code, output = running.finish()
    lines = output.splitlines()
    assert code == 23
    assert lines[-2].startswith("error: not ready after 5.00 s: writer/0: "), lines
    assert lines[-1].startswith("hint: "), lines
    assert_all_gone(list(everyone), tmp_path)


def test_a_stage_that_cannot_start_ends_it_with_the_engines_own_words(up, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    wrong = "name: wrong\nstages:\n  - {{name: writer, engine: synthetic, engine_args: {{tokens_per_secnd: 3}}}}\n"
    code, output = up(write_pipeline(tmp_path, text=wrong)).finish()
    assert code == 25
    last = output.splitlines()[-1]
    assert last.startswith("error: writer/0 on node local cannot start: ")
    assert "did you mean tokens_per_second?" in last


def test_a_wrong_pipeline_file_is_one_line_before_anything_starts(up, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = write_pipeline(tmp_path, text="name: wrong\nstages:\n  - {{name: writer, stage_typ: llm}}\n")
    code, output = up(path).finish()
    assert code == 10
    (line,) = output.splitlines()
    assert line.startswith(f"error: {path}") and line.endswith("stage_typ: unknown key; did you mean stage_type?")


def test_a_port_that_is_taken_is_said_in_one_line(up, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pipeline = write_pipeline(tmp_path)
    address = up(pipeline).await_ready()
    (tmp_path / "ready").unlink()
    code, output = up(pipeline, "--listen", address).finish()
    assert code == 25
    assert output.splitlines()[-1].startswith("error: the head cannot start: ") and address in output


def test_some_stages_here_and_the_rest_on_a_node_that_joins(up, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    running = up(write_pipeline(tmp_path), "--stages", "0", "--devices", "cpu:0")
    address = running.await_output("serves at ").split("serves at ")[1].split(";")[0]
    with AdminClient(address) as admin:
        eventually("a writer runs", lambda: [row.report.endpoint for row in admin.list_replicas()[0]])
        replicas, missing = admin.list_replicas()
        assert [row.report.replica.stage for row in replicas] == ["writer"]
        assert [slot.replica.stage for slot in missing] == ["painter"]
    worker = start(
        tmp_path, "worker", "--head", address, "--stage", "painter", "--node-id", "other", "--devices", "cpu:1"
    )
    try:
        assert running.await_ready() == address
        with Client(address) as client:
            assert any(isinstance(frame, Image) for frame in client.generate("a wish"))
        with AdminClient(address) as admin:
            where = {row.report.replica.stage: row.node_id for row in admin.list_replicas()[0]}
        assert where == {"writer": "local", "painter": "other"}
    finally:
        worker.signal(signal.SIGTERM)
        code = worker.wait()
    assert code == 0

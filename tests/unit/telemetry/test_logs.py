"""Log lines: readable, or JSON; and never in the way of who writes them."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from stagemesh.telemetry.logs import LogOutput, set_up_logging


@pytest.fixture(autouse=True)
def root_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The root logger as it was before, and the environment too."""
    monkeypatch.delenv("STAGEMESH_LOG_LEVEL", raising=False)
    monkeypatch.delenv("STAGEMESH_LOG_JSON", raising=False)
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_lines_for_people_say_when_how_grave_and_who() -> None:
    stream = io.StringIO()
    output = set_up_logging("node", stream=stream)
    logging.getLogger("a").warning("it %s", "rains")
    logging.getLogger("a").debug("nobody asked")
    output.forward("a line of its own", component="replica", stage="writer", replica=3)
    output.close()
    first, second = stream.getvalue().splitlines()
    assert first.endswith(" WARNING node: it rains")
    assert second.split(" ", 1)[1] == "[writer/3] a line of its own"


def test_lines_for_machines_are_json_with_the_fields_of_the_process() -> None:
    stream = io.StringIO()
    output = set_up_logging("replica", as_json=True, level="debug", stream=stream, stage="writer", replica=3)
    try:
        raise ValueError("so wrong")
    except ValueError:
        logging.getLogger("a.b").exception("it failed", extra={"request": "r1"})
    output.close()
    record = json.loads(stream.getvalue())
    assert record["time"].endswith("+00:00")
    assert (record["level"], record["component"], record["logger"]) == ("error", "replica", "a.b")
    assert (record["stage"], record["replica"], record["request"]) == ("writer", 3, "r1")
    assert record["message"] == "it failed"
    assert "ValueError: so wrong" in record["exception"]


def test_json_of_another_process_passes_as_it_is_and_all_else_is_wrapped() -> None:
    stream = io.StringIO()
    output = LogOutput(stream, as_json=True)
    own = json.dumps({"level": "info", "message": "hello", "component": "replica"})
    for line in (own, "plain", '{"a": 1}', "{broken"):
        output.forward(line, component="replica", stage="writer", replica=0)
    output.close()
    passed, *wrapped = stream.getvalue().splitlines()
    assert passed == own
    assert [json.loads(line)["message"] for line in wrapped] == ["plain", '{"a": 1}', "{broken"]
    assert {(json.loads(line)["stage"], json.loads(line)["replica"]) for line in wrapped} == {("writer", 0)}


@pytest.mark.parametrize("as_json", [False, True])
def test_a_child_logs_as_its_parent_does(as_json: bool) -> None:
    set_up_logging("node", level="warning", as_json=as_json, stream=io.StringIO()).close()
    code = (
        "import logging; from stagemesh.telemetry.logs import set_up_child_logging\n"
        "set_up_child_logging('replica', stage='writer', replica=3)\n"
        "logging.info('too little'); logging.getLogger('a').warning('it rains')"
    )
    printed = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=True).stderr
    if as_json:
        record = json.loads(printed)
        assert (record["message"], record["component"], record["stage"]) == ("it rains", "replica", "writer")
    else:
        assert printed == "WARNING a: it rains\n"


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="log level 'loud': want debug, info, warning or error"):
        set_up_logging("node", level="loud")


def test_a_reader_that_stops_reading_costs_lines_and_no_time() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as reader:
        output = LogOutput(stream, as_json=False, max_waiting=100)
        started = time.monotonic()
        for number in range(3000):
            output.put(f"{number} " + "x" * 200)  # 600 kB: a pipe holds 64
        assert time.monotonic() - started < 2.0
        lines: list[str] = []
        told = threading.Event()

        def read() -> None:
            for line in reader:
                lines.append(line)
                if "log lines were lost" in line:
                    told.set()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        assert told.wait(10)
        output.close()
        stream.close()
        thread.join(10)
    lost = sum(int(line.split()[0]) for line in lines if "log lines were lost" in line)
    assert lost > 0
    assert len([line for line in lines if "xxx" in line]) + lost == 3000


def test_a_reader_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w", buffering=1)
    output = LogOutput(stream, as_json=False)
    output.put("nobody hears this")
    output.put("nor this")
    output.close()
    assert not output._thread.is_alive()
    os.close(writing)

"""Log lines of the mesh's processes: for people, or a JSON object a line for machines.

In heads and node agents a thread writes them, from a bounded queue: whoever reads standard error too slowly, or not at
all, costs lines and never stops an event loop. A replica writes straight into the pipe that its node agent reads: it
may have to fork its engine, and a thread would be lost in that.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

LEVEL_VARIABLE, JSON_VARIABLE = "STAGEMESH_LOG_LEVEL", "STAGEMESH_LOG_JSON"
"""How a process that starts others tells them to log as it does."""
MAX_WAITING_LINES = 10_000
CLOSE_S = 2.0
"""For the lines that wait at the end."""
_TIME_FORMAT = "%H:%M:%S"
_RESERVED = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time (RFC 3339, UTC), level, component, logger, message, and what `extra` brought."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__()
        self._fields = dict(fields)

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line: dict[str, object] = {
            "time": _rfc3339(record.created),
            "level": record.levelname.lower(),
            **self._fields,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({key: value for key, value in vars(record).items() if key not in _RESERVED})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LogOutput:
    """Where the lines of this process go."""

    def __init__(self, stream: TextIO, *, as_json: bool, max_waiting: int = MAX_WAITING_LINES) -> None:
        self.as_json = as_json
        self._stream = stream
        self._waiting: queue.Queue[str | None] = queue.Queue(max_waiting)
        self._lost = 0
        self._thread = threading.Thread(target=self._write_forever, name="log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, line: str) -> None:
        """Write a line, soon; a line too many is lost and counted."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def forward(self, line: str, *, component: str, stage: str, replica: int) -> None:
        """Write a line that another process printed, with the name of who printed it.

        A line of JSON with a message is such a process's own log line and passes as it is.
        """
        if not self.as_json:
            self.put(f"{time.strftime(_TIME_FORMAT)} [{stage}/{replica}] {line}")
        elif _is_log_line(line):
            self.put(line)
        else:
            record = {
                "time": _rfc3339(datetime.now(UTC).timestamp()),
                "level": "info",
                "component": component,
                "stage": stage,
                "replica": replica,
                "message": line,
            }
            self.put(json.dumps(record))

    def close(self) -> None:
        """Write what waits, for as long as the reader lets us."""
        if self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=CLOSE_S)
            except queue.Full:
                return
            self._thread.join(CLOSE_S)

    def _write_forever(self) -> None:
        while (line := self._waiting.get()) is not None:
            if self._lost:
                line, self._lost = f"{self._lost} log lines were lost here: nobody read them in time\n{line}", 0
            try:
                self._stream.write(line + "\n")
                if self._waiting.empty():
                    self._stream.flush()
            except (OSError, ValueError):
                continue  # the reader is gone, or the stream closed at exit
        try:
            self._stream.flush()
        except (OSError, ValueError):
            return


class _Handler(logging.Handler):
    def __init__(self, output: LogOutput) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._output.put(self.format(record))
        except Exception:
            self.handleError(record)


def set_up_logging(
    component: str,
    *,
    level: str = "info",
    as_json: bool = False,
    stream: TextIO | None = None,
    **fields: object,
) -> LogOutput:
    """Log to standard error.

    Args:
        component: "head", "node" or "replica".
        level: debug, info, warning or error.
        fields: what each JSON line says besides, such as stage and replica.

    Raises:
        ValueError: the level is none of these.
    """
    number = _level(level)
    output = LogOutput(stream or sys.stderr, as_json=as_json)
    handler = _Handler(output)
    if as_json:
        handler.setFormatter(JsonFormatter({"component": component, **fields}))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {component}: %(message)s", _TIME_FORMAT))
    logging.basicConfig(level=number, handlers=[handler], force=True)
    os.environ[LEVEL_VARIABLE], os.environ[JSON_VARIABLE] = level, "1" if as_json else ""
    return output


def set_up_child_logging(component: str, **fields: object) -> None:
    """Log to standard error as the process does that started this one, which adds time and name to each line.

    Args:
        component, fields: as in `set_up_logging`.
    """
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get(JSON_VARIABLE):
        handler.setFormatter(JsonFormatter({"component": component, **fields}))
    else:
        handler.setFormatter(logging.Formatter("%(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=_level(os.environ.get(LEVEL_VARIABLE) or "info"), handlers=[handler], force=True)


def _level(name: str) -> int:
    number = logging.getLevelNamesMapping().get(name.upper())
    if number is None:
        raise ValueError(f"log level {name!r}: want debug, info, warning or error")
    return number


def _is_log_line(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and "message" in record and "level" in record


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")

"""Log lines of the mesh's processes: for people, or a JSON object a line for machines.

A thread writes them, from a bounded queue: whoever reads standard error too slowly, or not at all, costs lines and
never stops an event loop.
"""

from __future__ import annotations

import atexit
import json
import logging
import queue
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

MAX_WAITING_LINES = 10_000
CLOSE_S = 2.0
"""For the lines that wait at the end."""
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
            self.put(f"[{stage}/{replica}] {line}")
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
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r}: want debug, info, warning or error")
    output = LogOutput(stream or sys.stderr, as_json=as_json)
    handler = _Handler(output)
    if as_json:
        handler.setFormatter(JsonFormatter({"component": component, **fields}))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {component}: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=number, handlers=[handler], force=True)
    return output


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

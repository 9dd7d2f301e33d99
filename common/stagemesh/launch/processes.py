"""One guarded child process: spawned, read and reaped by a thread that lives as long as the child does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

TAIL_LINES = 200


class ChildProcess:
    """A module of ours in a process of its own.

    Its standard output and error go, line by line, to `on_line` (called from a thread) and the last ones are kept.
    It has a session of its own, so that a Ctrl-C of the terminal reaches the parent alone, which stops things in order.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        scratch: Path,
        on_line: Callable[[str, str], None] | None = None,
    ) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._module = module
        self._arguments = tuple(arguments)
        self._scratch = scratch
        self._on_line = on_line
        self._process: subprocess.Popen[str] | None = None
        self._started = threading.Event()
        self._start_error: OSError | None = None
        self._exited = threading.Event()
        self._lifeline = -1
        # The kernel ties "my parent died" to the thread that spawned: so it is one that stays until the child is gone.
        self._thread = threading.Thread(target=self._live, name=f"stagemesh-{name}", daemon=True)

    def start(self) -> None:
        """Spawn it. Raises OSError when that fails."""
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def _live(self) -> None:
        reading_end, self._lifeline = os.pipe()
        try:
            command = [sys.executable, "-m", "stagemesh.launch.guarded", str(reading_end), str(self._scratch)]
            self._process = subprocess.Popen(
                [*command, self._module, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                pass_fds=(reading_end,),
                start_new_session=True,
                # Lines at once, and errors as one line rather than in a frame drawn for a terminal.
                env={**os.environ, "PYTHONUNBUFFERED": "1", "TYPER_USE_RICH": "0"},
            )
        except OSError as error:
            self._start_error = error
            os.close(self._lifeline)
            return
        finally:
            os.close(reading_end)
            self._started.set()
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                line = line.rstrip("\n")
                self.tail.append(line)
                if self._on_line is not None:
                    self._on_line(self.name, line)
        self._process.wait()
        os.close(self._lifeline)
        self._exited.set()

    @property
    def pid(self) -> int:
        """Process id, 0 before it was spawned."""
        return self._process.pid if self._process is not None else 0

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode if self._exited.is_set() and self._process is not None else None

    def terminate(self) -> None:
        """Ask it to stop; asked twice, it stops at once."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it without asking."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and not self._exited.is_set():
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; returns whether it came."""
        return self._process is None or self._exited.wait(timeout_s)

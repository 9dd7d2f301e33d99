"""One replica process: spawned with a socket pair, heard line by line, and ended with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable

from stagemesh_worker.replica import control

log = logging.getLogger("stagemesh.replica.output")

TAIL_LINES = 50
REAP_S = 5.0
"""For a killed process to be gone."""


class ReplicaProcess:
    """A running `python -m stagemesh_worker.replica`.

    It has a process group of its own, so that what a killed replica leaves behind (an EngineCore, a diffusion child)
    can be ended with it.
    """

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, connection: socket.socket, assign: control.Assign
    ) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """Its last lines of output."""
        self._process = process
        self._socket = connection
        self._assign = assign
        self._writer: asyncio.StreamWriter | None = None
        self._output = asyncio.create_task(self._read_output())

    @classmethod
    async def spawn(cls, name: str, assign: control.Assign) -> ReplicaProcess:
        """Start one. Raises OSError when the system refuses."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "stagemesh_worker.replica",
                "--control-fd",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(name, process, ours, assign)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def listen(self, on_message: Callable[[control.Message], None]) -> int:
        """Send the assignment, hand every message to `on_message`, and wait for the end; returns the exit code."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=control.MAX_LINE_BYTES)
        await self.tell(self._assign)
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                try:
                    on_message(control.decode(line))
                except control.ControlError as error:
                    log.warning("[%s] a message that cannot be read: %s", self.name, error)
        return await self._process.wait()

    async def tell(self, message: control.Message) -> None:
        """Send a message; nothing happens when the replica is gone already."""
        if self._writer is None:
            return
        with contextlib.suppress(ConnectionError, OSError):
            self._writer.write(control.encode(message))
            await self._writer.drain()

    async def end(self) -> int:
        """Kill whatever is left of it and its children; returns the exit code."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        async with asyncio.timeout(REAP_S):
            code = await self._process.wait()
        # The group may outlive its leader by a moment, and holds the output pipe.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REAP_S):
                await asyncio.shield(self._output)
        self._output.cancel()
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()
        return code

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:
                continue  # a line longer than the buffer: the rest of it follows
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self.tail.append(text)
            log.info("[%s] %s", self.name, text)

"""One replica process: spawned with a socket pair, heard line by line, and ended with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from stagemesh_worker.replica import control

log = logging.getLogger(__name__)

TAIL_LINES = 200
MAX_LINE_BYTES = 16 << 10
"""A longer line of output is cut into several."""
REAP_S = 5.0
"""For killed processes to be gone; one that the kernel cannot end (a hung driver) may take longer."""
REAP_POLL_S = 0.02
OUTPUT_S = 1.0
"""For the rest of the output, once all that could write it are gone."""
MODULE = "stagemesh_worker.replica"


class ReplicaProcess:
    """A running `python -m stagemesh_worker.replica`.

    It leads a session and process group of its own: a Ctrl-C at the terminal does not reach it, and what a killed
    replica leaves behind (an EngineCore, a diffusion child) is ended with the group.
    """

    def __init__(
        self,
        name: str,
        assign: control.Assign,
        *,
        on_message: Callable[[control.Message], None],
        on_line: Callable[[str], None],
        on_end: Callable[[int], None],
        inherit: Sequence[int] = (),
    ) -> None:
        """Start it; must be called in the event loop's thread, which the kernel takes for the process's parent.

        Args:
            on_message: gets what it says.
            on_line: gets each line of its output.
            on_end: gets its exit code (negative: a signal), once it and its group are gone.
            inherit: descriptors that it keeps open.

        Raises:
            OSError: the system refuses.
        """
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """Its last lines of output."""
        self._on_message = on_message
        self._on_line = on_line
        self._on_end = on_end
        self._assign = assign
        self._control: asyncio.Transport | None = None
        self._transports: list[asyncio.BaseTransport] = []
        ours, theirs = socket.socketpair()
        try:
            # Not asyncio's own way of spawning: it reaps at once, and then the process group may be somebody else's.
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, "--control-fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), *inherit),
                start_new_session=True,
                # GPUs are numbered as NVML does, in the order of the PCI bus; CUDA's own default is another.
                env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours
        self.task = asyncio.get_running_loop().create_task(self._live(), name=f"replica {name}")
        """Ends with the process, whatever happens to it."""

    @property
    def pid(self) -> int:
        """Process id, and id of its group."""
        return self._process.pid

    def tell(self, message: control.Message) -> None:
        """Send a message; nothing happens when it cannot hear."""
        if self._control is not None and not self._control.is_closing():
            self._control.write(control.encode(message))

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it started."""
        if self._process.returncode is None:
            _kill_group(self.pid)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        output: asyncio.Future[None] = loop.create_future()
        try:
            await self._connect(output)
            await _ended(self.pid)
        except Exception:
            log.exception("[%s] cannot be watched, and is ended", self.name)
        finally:
            # Before it is reaped: until then the group's number cannot have been given to others.
            _kill_group(self.pid)
        code = await asyncio.to_thread(self._process.wait)
        deadline = loop.time() + REAP_S
        # What it started are no children of this process: nobody tells when they are gone.
        while (left := await asyncio.to_thread(_living, self.pid)) and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(REAP_POLL_S)
        if left:
            log.error("[%s] killed, but still there: processes %s", self.name, ", ".join(map(str, left)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OUTPUT_S):
                await output
        for transport in self._transports:
            transport.close()
        self._on_end(code)

    async def _connect(self, output: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        assert self._process.stdout is not None
        pipe, _ = await loop.connect_read_pipe(lambda: _Output(self._take_line, output), self._process.stdout)
        self._transports.append(pipe)
        self._control, _ = await loop.create_connection(
            lambda: _Control(self.name, self._on_message), sock=self._socket
        )
        self._transports.append(self._control)
        self.tell(self._assign)

    def _take_line(self, line: str) -> None:
        self.tail.append(line)
        self._on_line(line)


class _Control(asyncio.Protocol):
    def __init__(self, name: str, on_message: Callable[[control.Message], None]) -> None:
        self._name = name
        self._on_message = on_message
        self._buffer = control.LineBuffer()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for line in self._buffer.feed(data):
                self._on_message(control.decode(line))
        except control.ControlError as error:
            log.error("[%s] says what cannot be read: %s", self._name, error)
            if self._transport is not None:
                self._transport.close()  # it takes that for the agent's end, and stops


class _Output(asyncio.Protocol):
    def __init__(self, on_line: Callable[[str], None], end: asyncio.Future[None]) -> None:
        self._on_line = on_line
        self._end = end
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            # A progress bar writes its states over each other: the last one counts.
            self._on_line(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rest:
            self._on_line(self._rest.decode(errors="replace"))
        _settle(self._end)


async def _ended(pid: int) -> None:
    """Wait until a child is a zombie, without reaping it."""
    if not hasattr(os, "pidfd_open"):
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return
    loop = asyncio.get_running_loop()
    descriptor = os.pidfd_open(pid)
    over: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(descriptor, _settle, over)
        await over
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _living(group: int) -> list[int]:
    """Processes of a group that are not zombies: where the first process reaps nobody, zombies stay for ever."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    except PermissionError:
        pass
    living = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # After the command, which stands in parentheses and may hold anything: state, parent, group.
            state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # it ended meanwhile
        if int(its_group) == group and state not in "ZX":
            living.append(int(entry.name))
    return living

"""The replica's end of the control socket: blocking while the engine is prepared, on the event loop afterwards."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from stagemesh_worker.replica.control import Assign, ControlError, LineBuffer, Message, decode, encode

log = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 1 << 20
"""Reports that the agent does not read are dropped beyond this: a stopped agent must not stop its replicas."""


class ControlChannel:
    """Sends reports to the agent and hands its orders on."""

    def __init__(self, control: socket.socket) -> None:
        self._socket = control
        self._buffer = LineBuffer()
        self._writer: asyncio.Transport | None = None

    def read_assignment(self, timeout_s: float = 30.0) -> Assign:
        """Block until the first line is here.

        Raises:
            ControlError: it is no assignment.
            EOFError: the agent went away.
        """
        self._socket.settimeout(timeout_s)
        lines: list[bytes] = []
        while not lines:
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                raise ControlError(f"no assignment within {timeout_s:g} s") from None
            if not data:
                raise EOFError("the agent closed the control socket before it sent an assignment")
            lines = self._buffer.feed(data)
        message = decode(lines[0])
        if not isinstance(message, Assign) or len(lines) > 1:
            raise ControlError("want one assign message first")
        self._socket.setblocking(True)
        return message

    def send(self, message: Message) -> None:
        """Send one message. Never raises: a broken socket is noticed by its reader."""
        line = encode(message)
        if self._writer is None:
            try:
                self._socket.sendall(line)
            except OSError as error:
                log.debug("control socket: %s", error)
        elif not self._writer.is_closing() and self._writer.get_write_buffer_size() < MAX_UNSENT_BYTES:
            self._writer.write(line)

    async def open(self, on_message: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        """Go on inside the running loop; `on_end` is called when the agent is gone."""
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        self._writer, _ = await loop.create_connection(
            lambda: _Reader(self._buffer, on_message, on_end), sock=self._socket
        )

    async def close(self, timeout_s: float = 1.0) -> None:
        """Send what is left and close."""
        if self._writer is None:
            self._socket.close()
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        # Transports tell of a full buffer, not of an empty one.
        while self._writer.get_write_buffer_size() and not self._writer.is_closing() and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self._writer.close()


class _Reader(asyncio.Protocol):
    def __init__(self, buffer: LineBuffer, on_message: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        self._buffer = buffer
        self._on_message = on_message
        self._on_end = on_end

    def data_received(self, data: bytes) -> None:
        try:
            for line in self._buffer.feed(data):
                self._on_message(decode(line))
        except ControlError as error:
            log.error("control socket: %s", error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

"""A wire between two processes that a test can cut, silence in one direction, or slow down."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from typing import Self

from tests.mesh.faults.hostile import address_of

CHUNK = 65536
START_S = 10.0


@dataclass(slots=True)
class Wire:
    """How the wire is now. To the target is "up", from it "down"."""

    up: bool = True
    down: bool = True
    delay_s: float = 0.0
    """Before each piece is passed on, in each direction."""


class Proxy:
    """Forwards TCP connections to `target` ("host:port") as `wire` has it; runs in a thread of its own.

    A direction that is off holds back what comes, as a network that loses packets does: nobody gets a reset.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.wire = Wire()
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._serves = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._changed: asyncio.Condition
        self._end: asyncio.Event
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    def set(self, wire: Wire) -> None:
        """Make the wire so, from now on."""

        async def change() -> None:
            async with self._changed:
                self.wire = wire
                self._changed.notify_all()

        asyncio.run_coroutine_threadsafe(change(), self._loop).result(START_S)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._serves.wait(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(START_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._changed, self._end = asyncio.Condition(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._serves.set()
        await self._end.wait()
        server.close()
        self.wire = Wire()
        async with self._changed:
            self._changed.notify_all()
        for writer in tuple(self._writers):
            writer.close()
        if self._connections:
            await asyncio.wait(tuple(self._connections), timeout=START_S)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*address_of(self.target))
        except OSError:
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._writers |= {writer, far_writer}
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, far_writer, "up"))
                pumps.create_task(self._pump(far_reader, writer, "down"))
        finally:
            writer.close()
            far_writer.close()
            self._writers -= {writer, far_writer}
            self._connections.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        with contextlib.suppress(OSError):  # either end may be gone at any moment
            while piece := await reader.read(CHUNK):
                async with self._changed:
                    await self._changed.wait_for(lambda: bool(getattr(self.wire, direction)))
                if self.wire.delay_s:
                    await asyncio.sleep(self.wire.delay_s)
                writer.write(piece)
                await writer.drain()
            writer.write_eof()

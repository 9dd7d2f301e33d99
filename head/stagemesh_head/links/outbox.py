"""Commands that wait for a link's next write; all that arise between two writes travel as one message."""

from __future__ import annotations

import asyncio

from stagemesh.v1 import stage_pb2 as stage_pb


class Outbox:
    """One pending `ExecuteRequest`, filled synchronously, taken by the link's writer."""

    __slots__ = ("_message", "_waiter")

    def __init__(self) -> None:
        self._message: stage_pb.ExecuteRequest | None = None
        self._waiter: asyncio.Future[None] | None = None

    def pending(self) -> stage_pb.ExecuteRequest:
        """The message to add commands to; it will be sent."""
        if self._message is None:
            self._message = stage_pb.ExecuteRequest()
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        return self._message

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return self._message is None

    def clear(self) -> None:
        """Forget what was not sent."""
        self._message = None

    async def take(self) -> stage_pb.ExecuteRequest:
        """Wait for commands and take them all. One caller at a time."""
        if self._message is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        message, self._message = self._message, None
        assert message is not None
        return message

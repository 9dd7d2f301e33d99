"""The head's end of one Join call: what is to be sent, bounded, and how the call ends."""

from __future__ import annotations

import asyncio
from collections import deque

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import registry_pb2 as registry_pb

MAX_WAITING = 4_096
"""Messages that may wait for a node to read them; a node that reads nothing is cut off."""


class Session:
    """Written to by the registry, read by the servicer that owns the call."""

    def __init__(self, number: int, peer: str) -> None:
        self.number = number
        self.peer = peer
        self.is_closed = False
        self.error: MeshError | None = None
        """How the call is to end, once closed; None: OK."""
        self._waiting: deque[registry_pb.JoinResponse] = deque()
        self._news = asyncio.Event()

    def send(self, message: registry_pb.JoinResponse) -> None:
        """Queue a message; nothing once closed."""
        if self.is_closed:
            return
        if len(self._waiting) >= MAX_WAITING:
            self.close(MeshError(Reason.OVERLOADED, f"the node left {MAX_WAITING} messages unread"))
            return
        self._waiting.append(message)
        self._news.set()

    def close(self, error: MeshError | None) -> None:
        """End the call after what is queued. The first end counts."""
        if not self.is_closed:
            self.is_closed, self.error = True, error
            self._news.set()

    async def next(self) -> registry_pb.JoinResponse | None:
        """The next message, in order; None when the call is to end."""
        while not self._waiting:
            if self.is_closed:
                return None
            self._news.clear()
            await self._news.wait()
        return self._waiting.popleft()

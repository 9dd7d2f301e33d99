"""What a link tells a task that runs on its replica."""

from __future__ import annotations

from typing import Protocol

from stagemesh.rpc.errors import MeshError
from stagemesh.v1 import stage_pb2 as stage_pb

TERMINAL_EVENTS = frozenset({"finished", "failed", "aborted"})
"""`TaskEvent` cases after which a replica says nothing more of a task, so that its slot is free again."""


class LinkTask(Protocol):
    """A task on a link. All methods are called on the event loop, are synchronous, and must not raise.

    After one terminal event, or `on_lost`, nothing follows.
    """

    def on_tokens(self, token_ids: list[int], text: str) -> None:
        """New tokens and their text: the hot path, called once a task and batch."""

    def on_event(self, kind: str, event: stage_pb.TaskEvent) -> None:
        """Anything else; `kind` is the event's case."""

    def on_lost(self, error: MeshError) -> None:
        """The link broke, so whatever the replica still does for this task is lost."""

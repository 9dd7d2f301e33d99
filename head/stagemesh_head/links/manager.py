"""Which links there are: one to every replica process that serves or drains."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from stagemesh_head.links.link import Link
from stagemesh_head.registry.rows import Membership, ReplicaKey, ReplicaRow, ReplicaState

log = logging.getLogger(__name__)

_LINKED = frozenset({ReplicaState.READY, ReplicaState.SUSPECT, ReplicaState.DRAINING})
"""A SUSPECT replica keeps its link, since an open link is how it heals."""

LinkListener = Callable[[ReplicaKey, ReplicaRow | None, Link | None], None]


class LinkManager:
    """Opens and closes links as replicas come and go, and tells `listener` of every change of a row or link."""

    def __init__(self, membership: Membership, head_epoch: str, listener: LinkListener) -> None:
        self._membership = membership
        self._head_epoch = head_epoch
        self._listener = listener
        self._links: dict[ReplicaKey, Link] = {}
        self._rows: dict[ReplicaKey, ReplicaRow] = {}
        self.opened: Counter[ReplicaKey] = Counter()
        """How often a replica's link opened, by slot: to one process again, or to the next one in the slot."""
        self._closing: set[asyncio.Task[None]] = set()
        self._unsubscribe: Callable[[], None] | None = None

    def start(self) -> None:
        """Follow the membership."""
        self._unsubscribe = self._membership.subscribe(self._row_changed)
        for row in list(self._membership.rows()):
            self._row_changed(row.key, row)

    async def stop(self) -> None:
        """Close all links; tasks on them are lost."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        for key in list(self._links):
            self._drop(key, "the head stops")
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    def links(self) -> list[Link]:
        """All of them."""
        return list(self._links.values())

    def _row_changed(self, key: ReplicaKey, row: ReplicaRow | None) -> None:
        link = self._links.get(key)
        if row is None:
            self._rows.pop(key, None)
            self.opened.pop(key, None)
            if link is not None:
                self._drop(key, "it is gone")
        else:
            self._rows[key] = row
            wanted = row.state in _LINKED and bool(row.endpoint)
            if link is not None and (
                not wanted or (link.incarnation, link.endpoint) != (row.incarnation, row.endpoint)
            ):
                self._drop(key, row.reason or f"it is {row.state.name.lower()}")
                link = None
            if wanted and link is None:
                link = Link(key, row.incarnation, row.endpoint, self._head_epoch, self._link_changed)
                self._links[key] = link
                link.start()
        self._listener(key, row, self._links.get(key))

    def _link_changed(self, link: Link, reason: str) -> None:
        log.info("link %s is %s: %s", link.key, "up" if link.is_up else "down", reason)
        if self._links.get(link.key) is not link:
            return  # an older process's link; its replica is no longer in the pools
        if link.is_up:
            self.opened[link.key] += 1
        self._listener(link.key, self._rows.get(link.key), link)
        self._membership.link_changed(link.key, link.incarnation, link.is_up, reason)

    def _drop(self, key: ReplicaKey, reason: str) -> None:
        link = self._links.pop(key)
        self._listener(key, None, None)
        task = asyncio.create_task(link.close(reason), name=f"close link {key}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

"""A fixture that spawns real replica processes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from replica_harness import StartReplica, replicas


@pytest.fixture
async def start_replica() -> AsyncIterator[StartReplica]:
    """`await start_replica(assign fields, **fields of Stage)` spawns one; all are ended afterwards."""
    async with replicas() as start:
        yield start

"""What holds for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def device_locks_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Locks of devices in a folder of the run: else its nodes wait for whatever else runs on the machine."""
    before = os.environ.get("STAGEMESH_LOCK_DIR")
    os.environ["STAGEMESH_LOCK_DIR"] = str(tmp_path_factory.mktemp("locks"))
    yield
    if before is None:
        del os.environ["STAGEMESH_LOCK_DIR"]
    else:
        os.environ["STAGEMESH_LOCK_DIR"] = before

"""Where a head is when nobody says so."""

from __future__ import annotations

import os

DEFAULT_HEAD = "127.0.0.1:8470"
HEAD_VARIABLE = "STAGEMESH_HEAD"


def default_head() -> str:
    """host:port of the head: the environment's, or the default."""
    return os.environ.get(HEAD_VARIABLE) or DEFAULT_HEAD

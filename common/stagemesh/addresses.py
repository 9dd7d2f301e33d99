"""Addresses as people write them: HOST:PORT, and where a head is when nobody says so."""

from __future__ import annotations

import os

DEFAULT_HEAD = "127.0.0.1:8470"
MAX_PORT = 65_535
HEAD_VARIABLE = "STAGEMESH_HEAD"


def default_head() -> str:
    """host:port of the head: the environment's, or the default."""
    return os.environ.get(HEAD_VARIABLE) or DEFAULT_HEAD


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of host:port. Raises ValueError when it is none."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > MAX_PORT:
        raise ValueError(f"address {address!r}: want HOST:PORT, such as {DEFAULT_HEAD}")
    return host, int(port)

"""Who a node is, and where others reach it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from stagemesh.names import LABEL, LABEL_WORDS
from stagemesh.rpc.security import is_loopback

ANY_ADDRESS = frozenset({"0.0.0.0", "::", "[::]"})


class IdentityError(ValueError):
    """A name or address cannot be used; the text says why."""


def default_node_id() -> str:
    """The host's name as a label: stable across restarts of the agent, one node a host."""
    return re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower())[:63].strip("-") or "node"


def check_node_id(node_id: str) -> str:
    """An RFC-1123 label. Raises IdentityError."""
    if not LABEL.fullmatch(node_id):
        raise IdentityError(f"--node-id {node_id!r}: want {LABEL_WORDS}")
    return node_id


def host_id() -> str:
    """Identity of this host and its shared memory: equal for processes that can map each other's segments.

    Made of the boot and the device of /dev/shm, which containers with a /dev/shm of their own do not share.
    """
    parts = []
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with contextlib.suppress(OSError):
            parts.append(Path(path).read_text().strip())
    with contextlib.suppress(OSError):
        status = os.stat("/dev/shm")
        parts.append(f"{status.st_dev}:{status.st_ino}")
    return hashlib.sha256("|".join(parts or [socket.gethostname()]).encode()).hexdigest()[:16]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[::1]:port". Raises IdentityError."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise IdentityError(f"--head {address!r}: want HOST:PORT, such as 10.0.0.1:8470")
    return host.strip("[]"), int(port)


def url_host(host: str) -> str:
    """A host as it stands before ":port": IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


async def find_advertise_host(listen_host: str, head: str) -> str:
    """The address that others reach this node's replicas at.

    Where they listen; for all addresses, the source of the route to the head.

    Raises:
        IdentityError: they listen on this machine only, and the head is on another.
        OSError: the head's name cannot be resolved, or there is no route to it, now.
    """
    if listen_host not in ANY_ADDRESS and not is_loopback(listen_host):
        return listen_host
    source, peer = await _route(*split_address(head))
    if listen_host in ANY_ADDRESS:
        return url_host(source)
    # A route to oneself begins and ends at one address.
    if not is_loopback(source) and source != peer:
        raise IdentityError(
            f"replicas would listen on {listen_host}, where the head at {head} cannot reach them: give --listen-host "
            f"{source}, or --advertise-host if something forwards to them"
        )
    return listen_host


async def _route(host: str, port: int) -> tuple[str, str]:
    """Own and peer address of a packet to host:port. None is sent."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    failure: OSError = OSError(f"{host}: no address")
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0]), str(probe.getpeername()[0])
        except OSError as error:
            failure = error
    raise failure


def parse_labels(pairs: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE` words. Raises IdentityError that names the word."""
    labels = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise IdentityError(f"--label {pair!r}: want KEY=VALUE")
        labels[key] = value
    return labels

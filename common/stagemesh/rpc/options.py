"""Channel and server options, the same on every link of the mesh (values and reasons: docs/decisions/0002)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

MAX_MESSAGE_BYTES = 64 << 20
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS, MIN_PING_INTERVAL_MS = 30_000, 10_000, 10_000

_BOTH_ENDS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # An idle link must notice a dead peer too, and a long prefill counts as "without data".
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH_ENDS,
    # A proxy variable in the environment must not capture in-mesh traffic.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH_ENDS,
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    # Two processes never share a port by accident; gateways that mean to ask for it.
    ("grpc.so_reuseport", 0),
)


def open_channel(
    target: str, *, own_connection: bool = False, extra: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    """Open a channel to `target` (host:port).

    Args:
        own_connection: keep its HTTP/2 connection apart from other channels to the same target, so that bulk
            data does not delay control messages.
        extra: further channel arguments.
    """
    options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS, *extra]
    if own_connection:
        options.append(("grpc.use_local_subchannel_pool", 1))
    return grpc.aio.insecure_channel(target, options=options)

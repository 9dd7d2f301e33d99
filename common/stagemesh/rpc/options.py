"""Channels and their options, the same on every link of the mesh (values and reasons: docs/decisions/0002)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from stagemesh.rpc.security import Security, SecurityError, is_loopback

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

BULK_OPTIONS = (("grpc.http2.max_frame_size", 1 << 20),)
"""Frames of up to 1 MiB instead of 16 KiB: a seventh less CPU a byte on the receiving side."""


def open_channel(
    target: str,
    *,
    own_connection: bool = False,
    extra: Sequence[tuple[str, Any]] = (),
    security: Security | None = None,
) -> grpc.aio.Channel:
    """Open a channel to `target` (host:port).

    Args:
        own_connection: keep its HTTP/2 connection apart from other channels to the same target, so that bulk
            data does not delay control messages.
        extra: further channel arguments.
        security: how to speak; that of the process unless given.

    Raises:
        SecurityError: a token would have to cross an open network in clear.
    """
    security = security or Security.from_environment()
    options = channel_options(security, own_connection=own_connection, extra=extra)
    credentials = channel_credentials(target, security)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def open_bulk_channel(target: str) -> grpc.aio.Channel:
    """A channel with a connection of its own, for bulk: it delays nobody's control messages."""
    return open_channel(target, own_connection=True, extra=BULK_OPTIONS)


def channel_options(
    security: Security, *, own_connection: bool = False, extra: Sequence[tuple[str, Any]] = ()
) -> list[tuple[str, Any]]:
    """The arguments of a channel, also for the synchronous API."""
    options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS, *extra]
    if own_connection:
        options.append(("grpc.use_local_subchannel_pool", 1))
    if security.tls_server_name is not None:
        options.append(("grpc.ssl_target_name_override", security.tls_server_name))
    return options


def channel_credentials(target: str, security: Security) -> grpc.ChannelCredentials | None:
    """Credentials for `target`: TLS, a token, both, or None for a plain channel."""
    has_token = security.token_file is not None
    if security.tls_ca is not None:
        key = security.tls_key.read_bytes() if security.tls_key is not None else None
        chain = security.tls_cert.read_bytes() if security.tls_cert is not None else None
        transport = grpc.ssl_channel_credentials(security.tls_ca.read_bytes(), key, chain)
    elif has_token:
        host = target.rpartition(":")[0]
        if not is_loopback(host):
            raise SecurityError(f"a token would cross the network to {target} in clear: give --tls-ca")
        transport = grpc.local_channel_credentials()
    else:
        return None
    if not has_token:
        return transport
    return grpc.composite_channel_credentials(transport, grpc.metadata_call_credentials(_TokenPlugin(security)))


class _TokenPlugin(grpc.AuthMetadataPlugin):
    """Presents the process's token with every call, read anew so that a rotated one is seen."""

    def __init__(self, security: Security) -> None:
        self._security = security

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        try:
            callback((("authorization", f"Bearer {self._security.own_token()}"),), None)
        except (OSError, SecurityError) as error:
            callback((), error)

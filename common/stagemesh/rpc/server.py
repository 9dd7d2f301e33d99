"""Making a server: options, TLS with rotating certificates, and the check of callers' roles."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import grpc

from stagemesh.addresses import host_and_port
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import SERVER_OPTIONS
from stagemesh.rpc.security import Role, Security, SecurityError, TokenBook

log = logging.getLogger(__name__)

_ALLOWED: dict[str, frozenset[Role]] = {
    "stagemesh.v1.InferenceService": frozenset({Role.CLIENT, Role.OPERATOR}),
    "stagemesh.v1.AdminService": frozenset({Role.OPERATOR}),
    "stagemesh.v1.RegistryService": frozenset({Role.WORKER}),
    # Head and replicas present the worker token to each other.
    "stagemesh.v1.StageService": frozenset({Role.WORKER}),
    "stagemesh.v1.TensorService": frozenset({Role.WORKER}),
}
"""Service -> roles that may call it. Health needs no token, since probes have none; all else needs a valid one."""
NOTE_EVERY_S, MAX_NOTED = 10.0, 256
_OPEN = frozenset({"grpc.health.v1.Health"})


def create_server(
    security: Security | None = None, *, options: Sequence[tuple[str, Any]] = (), extra_roles: Sequence[Role] = ()
) -> grpc.aio.Server:
    """A server that checks tokens when the process has a token file.

    Args:
        options: further channel arguments.
        extra_roles: roles that may call every service, for processes that serve one caller only.
    """
    security = security or Security.from_environment()
    interceptors = [_RoleCheck(TokenBook(security.tokens), extra_roles)] if security.tokens is not None else []
    # By name, since of two values for one argument gRPC takes the first.
    return grpc.aio.server(interceptors=interceptors, options=list(dict([*SERVER_OPTIONS, *options]).items()))


def bind(server: grpc.aio.Server, address: str, security: Security | None = None) -> int:
    """Bind `server` to host:port (port 0 picks one); returns the port.

    Raises:
        SecurityError: wider than loopback without TLS.
        OSError: the address cannot be bound.
    """
    security = security or Security.from_environment()
    host, _ = host_and_port(address)
    security.check_bind(host)
    try:
        if security.serves_tls:
            bound = server.add_secure_port(address, _server_credentials(security))
        else:
            bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: the port is taken or the address is not of this machine") from error
    if bound == 0:
        raise OSError(f"cannot listen on {address}: the port is taken or the address is not of this machine")
    return bound


def _server_credentials(security: Security) -> grpc.ServerCredentials:
    """TLS credentials whose files are read again when one of them changed."""
    assert security.tls_cert is not None and security.tls_key is not None
    paths = [path for path in (security.tls_cert, security.tls_key, security.tls_ca) if path is not None]
    stamp = [_stamps(paths)]

    def configuration() -> grpc.ServerCertificateConfiguration:
        assert security.tls_cert is not None and security.tls_key is not None
        authorities = security.tls_ca.read_bytes() if security.tls_ca is not None else None
        pair = (security.tls_key.read_bytes(), security.tls_cert.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)

    def fetch() -> Any:  # None means: nothing changed
        try:
            now = _stamps(paths)
            if now == stamp[0]:
                return None
            fresh = configuration()
        except OSError:
            return None  # being replaced at this moment: the next handshake asks again
        stamp[0] = now
        return fresh

    try:
        initial = configuration()
    except OSError as error:
        raise SecurityError(f"TLS: {error}") from error
    return grpc.dynamic_ssl_server_credentials(
        initial, fetch, require_client_authentication=security.tls_ca is not None
    )


def _stamps(paths: Sequence[Path]) -> list[tuple[int, int]]:
    return [(status.st_mtime_ns, status.st_ino) for status in (path.stat() for path in paths)]


class _RoleCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without a token, or of a role that may not make them."""

    def __init__(self, book: TokenBook, extra_roles: Sequence[Role]) -> None:
        self._book = book
        self._extra = frozenset(extra_roles)
        self._noted: dict[tuple[str, str], float] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Let the call through, or put a handler in its place that refuses."""
        service = handler_call_details.method.rsplit("/", 2)[-2]
        if service in _OPEN:
            return await continuation(handler_call_details)
        handler = await continuation(handler_call_details)
        try:
            role = self._book.role_of(_bearer(handler_call_details))
            allowed = _ALLOWED.get(service, frozenset(Role)) | self._extra
            if role not in allowed:
                raise MeshError(
                    Reason.PERMISSION_DENIED,
                    f"a {role} token may not call {service}; it takes {', '.join(sorted(allowed))}",
                    role=role,
                    service=service,
                )
        except MeshError as error:
            self._note(handler_call_details.method, error)
            return _refusing(handler, error)
        return handler

    def _note(self, method: str, error: MeshError) -> None:
        """Log a refusal; the same one at most every few seconds, however often it is tried."""
        now, last = monotonic(), self._noted.get((method, error.message), -NOTE_EVERY_S)
        if now - last < NOTE_EVERY_S:
            return
        if len(self._noted) >= MAX_NOTED:
            self._noted.clear()
        self._noted[method, error.message] = now
        log.warning("refused a call of %s: %s", method, error.message)


def _bearer(details: grpc.HandlerCallDetails) -> str:
    for key, value in details.invocation_metadata or ():
        if key == "authorization" and isinstance(value, str) and value.startswith("Bearer "):
            return value.removeprefix("Bearer ")
    raise MeshError(Reason.UNAUTHENTICATED, "a token is needed: metadata `authorization: Bearer TOKEN`")


def _refusing(handler: Any, error: MeshError) -> Any:
    """A handler of the same kind that ends every call with `error`."""

    async def unary(request: Any, context: Any) -> Any:
        await error.abort(context)

    async def stream(request: Any, context: Any) -> Any:
        await error.abort(context)
        yield

    if handler is not None and handler.request_streaming:
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.stream_unary_rpc_method_handler(unary)
    if handler is not None and handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream)
    return grpc.unary_unary_rpc_method_handler(unary)

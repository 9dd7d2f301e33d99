"""TLS and mutual TLS over real sockets, with certificates that rotate."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagemesh.rpc import certificates
from stagemesh.rpc.certificates import create_authority, issue_certificate
from stagemesh.rpc.health import Health
from stagemesh.rpc.options import open_channel
from stagemesh.rpc.security import Security
from stagemesh.rpc.server import bind, create_server


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    create_authority(tmp_path / "certs")
    return tmp_path / "certs"


async def serve(security: Security) -> tuple[grpc.aio.Server, str]:
    server = create_server(security)
    health = Health(server, [])
    port = bind(server, "127.0.0.1:0", security)
    await server.start()
    await health.set_alive(True)
    return server, f"127.0.0.1:{port}"


async def check(target: str, security: Security) -> int:
    async with open_channel(target, security=security, own_connection=True) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=3, wait_for_ready=False)
        return int(answer.status)


async def test_mutual_tls_serves_who_has_a_certificate_and_nobody_else(authority: Path) -> None:
    cert, key = issue_certificate(authority, "head", ["127.0.0.1"])
    server, target = await serve(Security(tls_cert=cert, tls_key=key, tls_ca=authority / "ca.pem"))
    own_cert, own_key = issue_certificate(authority, "client", ["client"])
    try:
        known = Security(tls_cert=own_cert, tls_key=own_key, tls_ca=authority / "ca.pem")
        assert await check(target, known) == health_pb2.HealthCheckResponse.SERVING
        for stranger in (Security(tls_ca=authority / "ca.pem"), Security()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(target, stranger)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0)


async def test_certificate_of_another_authority_is_refused(authority: Path, tmp_path: Path) -> None:
    cert, key = issue_certificate(authority, "head", ["127.0.0.1"])
    server, target = await serve(Security(tls_cert=cert, tls_key=key, tls_ca=authority / "ca.pem"))
    create_authority(tmp_path / "other")
    other_cert, other_key = issue_certificate(tmp_path / "other", "client", ["client"])
    try:
        with pytest.raises(grpc.aio.AioRpcError):
            await check(target, Security(tls_cert=other_cert, tls_key=other_key, tls_ca=authority / "ca.pem"))
    finally:
        await server.stop(0)


async def test_expired_certificate_is_refused_on_either_side(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca = authority / "ca.pem"
    fresh, fresh_key = issue_certificate(authority, "fresh", ["127.0.0.1"])
    monkeypatch.setattr(certificates, "CLOCK_SKEW", timedelta(days=3))
    old, old_key = issue_certificate(authority, "old", ["127.0.0.1"], days=-1)
    for server_has, client_has in (((fresh, fresh_key), (old, old_key)), ((old, old_key), (fresh, fresh_key))):
        server, target = await serve(Security(tls_cert=server_has[0], tls_key=server_has[1], tls_ca=ca))
        try:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(target, Security(tls_cert=client_has[0], tls_key=client_has[1], tls_ca=ca))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            await server.stop(0)


async def test_rotated_certificate_is_used_without_a_restart(authority: Path) -> None:
    cert, key = issue_certificate(authority, "head", ["old.mesh"])
    server, target = await serve(Security(tls_cert=cert, tls_key=key))
    trust = authority / "ca.pem"
    try:
        assert await check(target, Security(tls_ca=trust, tls_server_name="old.mesh"))
        issue_certificate(authority, "head", ["new.mesh"])
        assert await check(target, Security(tls_ca=trust, tls_server_name="new.mesh"))
        with pytest.raises(grpc.aio.AioRpcError):
            await check(target, Security(tls_ca=trust, tls_server_name="old.mesh"))
    finally:
        await server.stop(0)


def test_private_keys_are_for_their_owner_only(authority: Path) -> None:
    _, key = issue_certificate(authority, "head", ["127.0.0.1"])
    assert {oct(path.stat().st_mode & 0o777) for path in (key, authority / "ca.key")} == {"0o600"}


def test_an_authority_is_never_replaced(authority: Path) -> None:
    with pytest.raises(FileExistsError, match="an authority is there already"):
        create_authority(authority)

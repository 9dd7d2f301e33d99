"""Tokens, roles and the rule about binding, over real sockets."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import open_channel
from stagemesh.rpc.security import Security, SecurityError, is_loopback, read_tokens
from stagemesh.rpc.server import bind, create_server
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import admin_pb2_grpc as admin_rpc

CLIENT, WORKER, OPERATOR = "client-token-0123456789", "worker-token-0123456789", "operator-token-0123456789"
EXPIRED = "expired-token-0123456789"


class _Admin(admin_rpc.AdminServiceServicer):
    async def ListNodes(self, request, context):  # type: ignore[no-untyped-def]
        return admin_pb.ListNodesResponse(next_page_token="served")

    async def WatchEvents(self, request, context):  # type: ignore[no-untyped-def]
        yield admin_pb.WatchEventsResponse()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(
        f"# who may call\nclient {CLIENT}\nworker {WORKER}\noperator {OPERATOR}\n"
        f"operator {EXPIRED} 2020-01-01T00:00:00Z\n"
    )
    return path


@asynccontextmanager
async def serving(tokens: Path) -> AsyncIterator[str]:
    security = Security(tokens=tokens)
    server = create_server(security)
    admin_rpc.add_AdminServiceServicer_to_server(_Admin(), server)
    port = bind(server, "127.0.0.1:0", security)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def list_nodes(target: str, token_path: Path | None) -> str:
    async with open_channel(target, security=Security(token_file=token_path)) as channel:
        try:
            answer = await admin_rpc.AdminServiceStub(channel).ListNodes(admin_pb.ListNodesRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            raise MeshError.from_rpc_error(error) from None
    return answer.next_page_token


def own(tmp_path: Path, token: str) -> Path:
    path = tmp_path / f"own-{token[:6]}"
    path.write_text(token + "\n")
    return path


async def test_operator_token_may_list_nodes(token_file: Path, tmp_path: Path) -> None:
    async with serving(token_file) as target:
        assert await list_nodes(target, own(tmp_path, OPERATOR)) == "served"


@pytest.mark.parametrize(
    ("token", "reason", "says"),
    [
        (None, Reason.UNAUTHENTICATED, "a token is needed"),
        ("unknown-token-0123456789", Reason.UNAUTHENTICATED, "not known"),
        (EXPIRED, Reason.UNAUTHENTICATED, "expired at 2020-01-01"),
        (CLIENT, Reason.PERMISSION_DENIED, "a client token may not call stagemesh.v1.AdminService; it takes operator"),
        (WORKER, Reason.PERMISSION_DENIED, "a worker token may not call"),
    ],
)
async def test_call_without_the_right_token_is_refused_with_a_reason(
    token_file: Path, tmp_path: Path, token: str | None, reason: Reason, says: str
) -> None:
    async with serving(token_file) as target:
        with pytest.raises(MeshError, match=says) as caught:
            await list_nodes(target, own(tmp_path, token) if token else None)
    assert caught.value.reason is reason


async def test_stream_is_refused_like_a_unary_call(token_file: Path) -> None:
    async with serving(token_file) as target, open_channel(target, security=Security()) as channel:
        stream = admin_rpc.AdminServiceStub(channel).WatchEvents(admin_pb.WatchEventsRequest(), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_rotated_token_file_takes_effect_at_once(token_file: Path, tmp_path: Path) -> None:
    fresh = "operator-fresh-0123456789"
    async with serving(token_file) as target:
        with pytest.raises(MeshError):
            await list_nodes(target, own(tmp_path, fresh))
        replacement = tmp_path / "new"
        replacement.write_text(f"operator {fresh}\n")
        os.replace(replacement, token_file)
        assert await list_nodes(target, own(tmp_path, fresh)) == "served"
        with pytest.raises(MeshError, match="not known"):
            await list_nodes(target, own(tmp_path, OPERATOR))


async def test_half_written_token_file_keeps_the_last_good_state(token_file: Path, tmp_path: Path) -> None:
    async with serving(token_file) as target:
        token_file.write_text("operatr broken")
        assert await list_nodes(target, own(tmp_path, OPERATOR)) == "served"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("admin sixteen-characters!", r"tokens:1: unknown role 'admin'; roles are client, worker, operator"),
        ("client", "want `ROLE TOKEN"),
        ("client short", "shorter than 16"),
        ("client sixteen-characters! tomorrow", "'tomorrow' is not an RFC 3339 time"),
    ],
)
def test_bad_token_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(line + "\n")
    with pytest.raises(SecurityError, match=says):
        read_tokens(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "127.8.8.8"])
def test_loopback_needs_no_tls(host: str) -> None:
    assert is_loopback(host)
    Security().check_bind(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "example.org"])
def test_wider_bind_needs_tls_or_an_explicit_risk(host: str) -> None:
    with pytest.raises(SecurityError, match="--insecure"):
        Security().check_bind(host)
    Security(insecure=True).check_bind(host)


def test_token_never_crosses_an_open_network_in_clear(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match="in clear"):
        open_channel("10.1.2.3:1", security=Security(token_file=own(tmp_path, CLIENT)))


def test_certificate_without_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match="go together"):
        Security(tls_cert=tmp_path / "cert.pem").check()


async def test_taken_port_is_an_error_that_names_the_address() -> None:
    first = create_server(Security())
    port = bind(first, "127.0.0.1:0", Security())
    second = create_server(Security())
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
        bind(second, f"127.0.0.1:{port}", Security())
    await first.stop(0)

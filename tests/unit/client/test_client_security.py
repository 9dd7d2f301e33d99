"""Both clients over mutual TLS, with a token; and what they refuse to send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from stagemesh import AsyncClient, Client, Unreachable
from stagemesh.rpc.certificates import create_authority, issue_certificate
from stagemesh.rpc.security import Security, SecurityError
from tests.unit.client.scripted_head import ScriptedHead, whole_answer


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    create_authority(tmp_path)
    issue_certificate(tmp_path, "mesh", ["localhost", "127.0.0.1"])
    (tmp_path / "token").write_text("a-token-of-enough-letters\n")
    return tmp_path


@pytest.fixture
def head(certificates: Path) -> Iterator[ScriptedHead]:
    pair = ((certificates / "mesh.key").read_bytes(), (certificates / "mesh.pem").read_bytes())
    authority = (certificates / "ca.pem").read_bytes()
    credentials = grpc.ssl_server_credentials([pair], authority, require_client_auth=True)
    scripted = ScriptedHead(whole_answer, credentials=credentials)
    yield scripted
    scripted.stop()


async def test_a_client_with_a_certificate_and_a_token_is_served(head: ScriptedHead, certificates: Path) -> None:
    security = Security(
        tls_ca=certificates / "ca.pem",
        tls_cert=certificates / "mesh.pem",
        tls_key=certificates / "mesh.key",
        token_file=certificates / "token",
    )
    with Client(head.address, security=security) as client:
        assert client.get_pipeline().name == "shapes"
    async with AsyncClient(head.address, security=security) as aio:
        assert (await aio.get_pipeline()).name == "shapes"
    assert [call["authorization"] for call in head.metadata] == ["Bearer a-token-of-enough-letters"] * 2


@pytest.mark.parametrize("with_authority", [True, False])
async def test_a_client_without_a_certificate_is_not_served(
    head: ScriptedHead, certificates: Path, with_authority: bool
) -> None:
    security = Security(tls_ca=certificates / "ca.pem" if with_authority else None)
    with Client(head.address, security=security) as client, pytest.raises(Unreachable, match="may want TLS"):
        client.get_pipeline()
    async with AsyncClient(head.address, security=security) as aio:
        with pytest.raises(Unreachable):
            await aio.get_pipeline()
    assert not head.metadata


def test_a_token_never_crosses_an_open_network_in_clear(certificates: Path) -> None:
    with pytest.raises(SecurityError, match="in clear"):
        Client("head.example:8470", security=Security(token_file=certificates / "token"))


def test_what_is_wrong_with_tls_is_said(head: ScriptedHead, certificates: Path, tmp_path: Path) -> None:
    create_authority(tmp_path / "other")
    strange = Security(tls_ca=tmp_path / "other/ca.pem")
    with Client(head.address, security=strange) as client, pytest.raises(Unreachable, match="not of an authority"):
        client.get_pipeline()
    plain = ScriptedHead(whole_answer)
    security = Security(tls_ca=certificates / "ca.pem")
    try:
        with Client(plain.address, security=security) as client, pytest.raises(Unreachable, match="not speak TLS"):
            client.get_pipeline()
    finally:
        plain.stop()

"""Who a node is, and where others reach it."""

from __future__ import annotations

import socket

import pytest

from stagemesh_worker.node import identity
from stagemesh_worker.node.identity import IdentityError


@pytest.mark.parametrize(
    ("hostname", "node_id"),
    [("Box-7.example.org", "box-7-example-org"), ("_", "node"), ("x" * 62 + "--y", "x" * 62), ("9a", "9a")],
)
def test_the_hosts_name_makes_a_label(monkeypatch: pytest.MonkeyPatch, hostname: str, node_id: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: hostname)
    assert identity.check_node_id(identity.default_node_id()) == node_id


@pytest.mark.parametrize("node_id", ["", "A", "a_b", "-a", "a" * 64])
def test_a_node_id_that_is_no_label_is_refused(node_id: str) -> None:
    with pytest.raises(IdentityError, match=r"--node-id .*want 1 to 63"):
        identity.check_node_id(node_id)


def test_host_id_is_the_same_at_every_look() -> None:
    assert identity.host_id() == identity.host_id()
    assert len(identity.host_id()) == 16


@pytest.mark.parametrize(
    ("address", "parts"),
    [("head:8470", ("head", 8470)), ("[::1]:1", ("::1", 1)), ("127.0.0.1:65535", ("127.0.0.1", 65535))],
)
def test_addresses_are_split(address: str, parts: tuple[str, int]) -> None:
    assert identity.split_address(address) == parts


@pytest.mark.parametrize("address", ["head", "head:", ":8470", "head:0", "head:65536", "head:http", ""])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(IdentityError, match=r"--head .*want HOST:PORT"):
        identity.split_address(address)


@pytest.mark.parametrize(
    ("host", "written"), [("::1", "[::1]"), ("[::1]", "[::1]"), ("::", "[::]"), ("10.0.0.5", "10.0.0.5"), ("", "")]
)
def test_ipv6_hosts_are_bracketed_for_a_port(host: str, written: str) -> None:
    assert identity.url_host(host) == written


async def test_replicas_of_a_local_head_are_reached_where_they_listen() -> None:
    assert await identity.find_advertise_host("127.0.0.1", "127.0.0.1:8470") == "127.0.0.1"
    assert await identity.find_advertise_host("10.1.2.3", "nowhere.invalid:8470") == "10.1.2.3"


async def test_listening_everywhere_advertises_the_source_of_the_route() -> None:
    assert await identity.find_advertise_host("0.0.0.0", "127.0.0.1:8470") == "127.0.0.1"


async def test_listening_on_loopback_for_a_head_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def route(host: str, port: int) -> tuple[str, str]:
        return "10.0.0.7", "10.0.0.1"

    monkeypatch.setattr(identity, "_route", route)
    with pytest.raises(IdentityError, match=r"give --listen-host 10\.0\.0\.7"):
        await identity.find_advertise_host("127.0.0.1", "10.0.0.1:8470")


async def test_a_head_on_this_hosts_own_address_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    async def route(host: str, port: int) -> tuple[str, str]:
        return "10.0.0.7", "10.0.0.7"

    monkeypatch.setattr(identity, "_route", route)
    assert await identity.find_advertise_host("127.0.0.1", "10.0.0.7:8470") == "127.0.0.1"


def test_labels_are_key_value_words() -> None:
    assert identity.parse_labels(["a=b", "c=d=e", "f="]) == {"a": "b", "c": "d=e", "f": ""}
    with pytest.raises(IdentityError, match="--label 'x': want KEY=VALUE"):
        identity.parse_labels(["x"])

"""Addresses of several gateway processes beside each other."""

from __future__ import annotations

import pytest

from stagemesh.addresses import host_and_port
from stagemesh_head.processes import nth_port


@pytest.mark.parametrize(
    ("address", "third"),
    [("127.0.0.1:9000", "127.0.0.1:9002"), ("[::1]:9000", "[::1]:9002"), ("127.0.0.1:0", "127.0.0.1:0")],
)
def test_each_process_has_the_port_after_the_one_before_unless_any_will_do(address: str, third: str) -> None:
    assert nth_port(address, 0) == address
    assert nth_port(address, 2) == third


@pytest.mark.parametrize("address", ["9000", "localhost", "localhost:", "localhost:http", "127.0.0.1:70000", "h:-1"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(ValueError, match=f"address '{address}': want HOST:PORT"):
        host_and_port(address)

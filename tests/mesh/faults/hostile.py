"""What no peer of the mesh would send: bytes that are no HTTP/2, huge messages, connections that say nothing."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence

import grpc

from stagemesh.rpc.options import MAX_MESSAGE_BYTES

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS_OF_NO_STREAM = b"\x00\x00\x04\x01\x05\x00\x00\x00\x00\xff\xff\xff\xff"
HUGE_FRAME = b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"
ANSWER_S = 5.0


def address_of(endpoint: str) -> tuple[str, int]:
    """Host and port of `host:port`."""
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


def listens(endpoint: str) -> bool:
    """Whether somebody takes connections there."""
    try:
        socket.create_connection(address_of(endpoint), ANSWER_S).close()
    except OSError:
        return False
    return True


def garbage(endpoint: str, rounds: int = 20) -> int:
    """Say nonsense on fresh connections; returns how many the server ended itself, of 5 * `rounds`."""
    ended = 0
    for _ in range(rounds):
        for nonsense in (
            os.urandom(4096),
            b"GET / HTTP/1.1\r\nHost: mesh\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(64),
            PREFACE + HEADERS_OF_NO_STREAM,
            PREFACE + HUGE_FRAME + os.urandom(64),
        ):
            with socket.create_connection(address_of(endpoint), ANSWER_S) as connection:
                ended += _is_ended_after(connection, nonsense)
    return ended


def _is_ended_after(connection: socket.socket, nonsense: bytes) -> bool:
    # An answer, an end and a reset are all fine; what counts is whether the server goes on.
    try:
        connection.sendall(nonsense)
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def call(endpoint: str, method: str, message: bytes) -> grpc.StatusCode:
    """Send `message` as it is to a method of the mesh; returns the status code of its end."""
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(endpoint, options) as channel:
        stream = channel.stream_stream(method, lambda data: data, lambda data: data)(iter([message]), timeout=20)
        try:
            for _ in stream:
                pass
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def oversized(endpoint: str, method: str) -> grpc.StatusCode:
    """One message a byte over what the mesh takes."""
    return call(endpoint, method, bytes(MAX_MESSAGE_BYTES + 1))


def oversized_line(endpoint: str) -> bytes:
    """An HTTP/1 request whose first line never ends; returns what the server says to it before it hangs up."""
    answer = b""
    with socket.create_connection(address_of(endpoint), ANSWER_S) as connection:
        with contextlib.suppress(OSError):  # it may hang up meanwhile
            connection.sendall(b"GET /metrics?" + b"x" * (MAX_MESSAGE_BYTES + 1))
        with contextlib.suppress(OSError):
            while piece := connection.recv(65536):
                answer += piece
    return answer


@contextlib.contextmanager
def silent(endpoints: Sequence[str], count: int) -> Iterator[list[socket.socket]]:
    """`count` connections, spread over `endpoints`, that say nothing as long as the block runs."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(address_of(endpoints[i % len(endpoints)]), ANSWER_S))
            for i in range(count)
        ]

"""How fast a tensor gets from one stage to the next, beside what the machine itself can do.

Two processes, a producer and a consumer, in one run and in alternation, since absolute figures drift:

    same host    TensorStore.put -> TensorResolver.resolve -> every byte read    beside  memcpy,
                 and a plain file in /dev/shm written and read back
    other host   TensorResolver.resolve over gRPC (FetchTensor)                  beside  bare grpc.aio that streams the
                 same chunks without store or checksum: once thrown away, once kept in an array as a consumer needs it

    python benchmarks/tensors.py [--mib 256] [--rounds 7]

Rates are bytes of the tensor per second of wall time, median of the rounds; a round measures every way once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import numpy as np

from stagemesh.rpc.options import open_channel
from stagemesh.rpc.server import bind, create_server
from stagemesh.tensors import TensorResolver, TensorServicer, TensorStore, sweep_segments
from stagemesh.tensors.service import CHUNK_BYTES
from stagemesh.v1 import tensor_pb2 as tensor_pb

HOST = "benchmark-host"
GOALS = {"same host / shm": 0.8, "fetch / bare gRPC, kept": 0.9, "fetch / bare gRPC, thrown away": 0.9}
BARE_METHOD = "/stagemesh.benchmark.Bare/Stream"


# ------------------------------------------------------------------ the producer's process
class Bare(grpc.GenericRpcHandler):
    """Streams the tensor's bytes in chunks, and nothing else."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.unary_stream_rpc_method_handler(self._stream) if details.method == BARE_METHOD else None

    async def _stream(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for offset in range(0, len(self._data), CHUNK_BYTES):
            yield bytes(self._data[offset : offset + CHUNK_BYTES])


async def produce(size: int, control: socket.socket) -> None:
    """Serve until the control socket ends. Each line asks for one thing, the answer is one line."""
    array = np.random.default_rng(1).integers(0, 255, size, dtype=np.uint8)
    store = TensorStore(host_id=HOST, incarnation="benchmark", max_bytes=4 * size)
    server = create_server()
    port = bind(server, "127.0.0.1:0")
    TensorServicer(store).add_to_server(server)
    server.add_generic_rpc_handlers((Bare(array.data),))
    await server.start()
    store.endpoint = f"127.0.0.1:{port}"
    reader, writer = await asyncio.open_connection(sock=control)
    while line := (await reader.readline()).decode().strip():
        if line == "put":
            value = await store.put_async("benchmark", array)
            answer = value.SerializeToString().hex()
        elif line == "release":
            answer = str(store.release_request("benchmark"))
        elif line.startswith("file "):
            await asyncio.to_thread(Path(line[5:]).write_bytes, array)
            answer = line[5:]
        else:
            answer = store.endpoint
        writer.write(answer.encode() + b"\n")
        await writer.drain()
    writer.close()
    store.close()
    await server.stop(0)


# ------------------------------------------------------------------ the consumer's process
class Producer:
    """The consumer's end of the control socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, line: str) -> str:
        self._writer.write(line.encode() + b"\n")
        await self._writer.drain()
        return (await asyncio.wait_for(self._reader.readline(), 120)).decode().strip()


def read_file(file: Path, target: np.ndarray) -> None:  # type: ignore[type-arg]
    """Read a file into an array, and remove it."""
    with file.open("rb") as opened:
        opened.readinto(target.data)
    file.unlink()


def read_all(array: np.ndarray) -> int:  # type: ignore[type-arg]
    """Touch every byte once, as fast as memory gives them."""
    return int(array.view(np.uint64).sum())


async def measure(size: int, rounds: int, control: socket.socket) -> dict[str, list[float]]:
    """Seconds of each way, by round."""
    producer = Producer(*await asyncio.open_connection(sock=control))
    near, far = TensorResolver(host_id=HOST), TensorResolver(host_id="another-host")
    endpoint = await producer.ask("endpoint")
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    file = Path(f"/dev/shm/stagemesh-benchmark-{os.getpid()}")

    async def memcpy() -> None:
        target[:] = source

    async def plain_file() -> None:
        await producer.ask(f"file {file}")
        read_file(file, target)
        read_all(target)

    async def same_host() -> None:
        value = tensor_pb.TensorValue.FromString(bytes.fromhex(await producer.ask("put")))
        array = await near.resolve(value)
        if not isinstance(owner(array), mmap.mmap):
            raise SystemExit("the segment was not mapped")
        read_all(array)

    async def fetch() -> None:
        array = await far.resolve(kept)
        if array.nbytes != size:
            raise SystemExit("bytes are missing")

    async def bare() -> None:
        received = 0
        async for chunk in stream(b""):
            received += len(chunk)
        if received != size:
            raise SystemExit("bytes are missing")

    async def bare_kept() -> None:
        received, array = 0, np.empty(size, np.uint8)
        async for chunk in stream(b""):
            array.data[received : received + len(chunk)] = chunk
            received += len(chunk)
        if received != size:
            raise SystemExit("bytes are missing")

    channel = open_channel(endpoint, own_connection=True)
    stream = channel.unary_stream(BARE_METHOD)
    ways: dict[str, Callable[[], Awaitable[None]]] = {
        "memcpy": memcpy, "shm": plain_file, "same host": same_host, "bare gRPC": bare, "bare kept": bare_kept,
        "fetch": fetch,
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for number in range(rounds + 1):  # the first one only warms up
            for name, way in ways.items():
                if name == "fetch":
                    kept = tensor_pb.TensorValue.FromString(bytes.fromhex(await producer.ask("put")))
                started = time.perf_counter()
                await way()
                took = time.perf_counter() - started
                if number:
                    seconds[name].append(took)
                await producer.ask("release")
    finally:
        await channel.close()
        await near.close()
        await far.close()
    return seconds


def owner(array: np.ndarray) -> object:  # type: ignore[type-arg]
    """What the memory of an array belongs to."""
    base: object = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


def report(seconds: dict[str, list[float]], size: int) -> dict[str, float]:
    """Print the table; returns median rates and ratios."""
    rate = {name: size / 1e9 / statistics.median(took) for name, took in seconds.items()}
    texts = {
        "memcpy": "memcpy inside one process",
        "shm": "plain /dev/shm file, written and read",
        "same host": "store, map, read (two processes)",
        "bare gRPC": "bare grpc.aio stream, thrown away",
        "bare kept": "bare grpc.aio stream, kept in an array",
        "fetch": "FetchTensor, checked, into an array",
    }
    print(f"{size >> 20} MiB, median of {len(seconds['memcpy'])} rounds, chunks of {CHUNK_BYTES >> 10} KiB")
    for name, text in texts.items():
        print(f"  {text:<40} {rate[name]:6.2f} GB/s")
    pairs = {
        "same host / shm": ("same host", "shm"),
        "fetch / bare gRPC, kept": ("fetch", "bare kept"),
        "fetch / bare gRPC, thrown away": ("fetch", "bare gRPC"),
    }
    ratios = {}
    for name, (ours, theirs) in pairs.items():
        by_round = [b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        ratios[name] = statistics.median(by_round)
        print(
            f"  {name:<40} {ratios[name]:6.2f} x    (rounds {min(by_round):.2f} to {max(by_round):.2f}, "
            f"goal {GOALS[name]})"
        )
    return {**rate, **ratios}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="size of the tensor in MiB")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--produce", type=int, help=argparse.SUPPRESS)  # control socket of the producer
    arguments = parser.parse_args()
    size = arguments.mib << 20
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    if arguments.produce is not None:
        asyncio.run(produce(size, socket.socket(fileno=arguments.produce)))
        return
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, "--mib", str(arguments.mib), "--produce", str(theirs.fileno())]
    producer = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
    theirs.close()
    try:
        figures = report(asyncio.run(measure(size, arguments.rounds, ours)), size)
    finally:
        ours.close()
        try:
            producer.wait(20)
        except subprocess.TimeoutExpired:
            producer.kill()
            producer.wait()
        sweep_segments()
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

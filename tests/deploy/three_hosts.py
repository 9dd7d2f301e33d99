"""Hosts that are network namespaces: each has an address, a name and a /dev/shm of its own; a bridge joins them.

The bridge too lives in a namespace, so that nothing here can meet an address of the real machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from tests.mesh.faults.processes import Process, Processes, eventually

SUBNET = "10.86.0"
PORT = 8470
CLONE_NEWNET = 0x40000000
END_S = 10.0


def why_not() -> str:
    """Why hosts cannot be had here; empty when they can."""
    if shutil.which("ip") is None:
        return "no `ip` command (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"sm{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip()}"
    try:
        # A host's own /dev/shm, and a bridge, are needed as well.
        _ip("netns", "exec", name, "mount", "-t", "tmpfs", "shm", "/dev/shm")
        _ip("-n", name, "link", "add", "br0", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"no mounts or bridges in namespaces: {error.stderr.strip()}"
    finally:
        _ip("netns", "del", name)
    return ""


def _remove_what_killed_tests_left() -> None:
    """A test run that is killed cannot remove its hosts: the next one does, with the processes in them."""
    for line in _ip("netns", "list").splitlines():
        space = line.split()[0]
        owner = re.match(r"sm(\d+)-", space)
        if owner is None or Path(f"/proc/{owner[1]}").exists():
            continue
        # Another run may be at the same.
        with contextlib.suppress(subprocess.CalledProcessError, ProcessLookupError):
            for pid in _ip("netns", "pids", space).split():
                os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "del", space)
        shutil.rmtree(f"/etc/netns/{space}", ignore_errors=True)


class Network:
    """Hosts and the bridge between them."""

    def __init__(self) -> None:
        self._prefix = f"sm{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self._addresses: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._made: list[str] = []

    def open(self) -> None:
        """Make the bridge."""
        _remove_what_killed_tests_left()
        self._add_namespace(self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")

    def add(self, host: str, last: int, name: str = "") -> None:
        """A host at address `SUBNET.last`, known to all by `name` (its own by default)."""
        space, port, address = self.space(host), f"p{last}", f"{SUBNET}.{last}"
        self._add_namespace(space)
        _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        self._addresses[host] = address
        self._names[name or host] = address
        self._write_names()

    def remove(self, host: str) -> None:
        """Nothing of it is left; its processes must have ended."""
        self._delete(self.space(host))
        gone = self._addresses.pop(host)
        self._names = {name: address for name, address in self._names.items() if address != gone}
        self._write_names()

    def cut(self, host: str) -> None:
        """Pull the cable: packets are lost, and no connection is told."""
        self._set_port(host, "down")

    def heal(self, host: str) -> None:
        """Put the cable back."""
        self._set_port(host, "up")

    def add_address(self, host: str, last: int) -> str:
        """A second address of a host."""
        _ip("-n", self.space(host), "addr", "add", f"{SUBNET}.{last}/24", "dev", "eth0")
        return f"{SUBNET}.{last}"

    def forbid(self, host: str, address: str) -> None:
        """`host` cannot reach `address` any more, as a firewall would have it."""
        _ip("-n", self.space(host), "route", "add", "unreachable", address)

    def address(self, host: str) -> str:
        return self._addresses[host]

    def space(self, host: str) -> str:
        """Name of the host's namespace."""
        return f"{self._prefix}-{host}"

    def close(self) -> None:
        for space in reversed(self._made.copy()):
            with contextlib.suppress(subprocess.CalledProcessError):
                self._delete(space)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()

    def _set_port(self, host: str, state: str) -> None:
        _ip("-n", self._switch, "link", "set", f"p{self._addresses[host].rpartition('.')[2]}", state)

    def _add_namespace(self, space: str) -> None:
        _ip("netns", "add", space)
        self._made.append(space)

    def _delete(self, space: str) -> None:
        shutil.rmtree(f"/etc/netns/{space}", ignore_errors=True)
        self._made.remove(space)
        _ip("netns", "del", space)

    def _write_names(self) -> None:
        """`ip netns exec` lays these over /etc; written in place, so that running processes see the change too."""
        hosts = "".join(f"{address} {name}\n" for name, address in self._names.items())
        for host in self._addresses:
            folder = Path("/etc/netns") / self.space(host)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")


class HostProcesses(Processes):
    """The processes of one mesh on several hosts; the test's own client sits on the host `client`."""

    def __init__(self, folder: Path, pipeline: Path, network: Network) -> None:
        super().__init__(folder, pipeline)
        self.network = network
        self.relay = Relay(network.space("client"), network.address("head"), PORT)
        self.address = self.relay.address
        self.environment |= {"STAGEMESH_INSECURE": "1"}

    def start_on(self, host: str, module: str, *arguments: str) -> Process:
        """Run a module on a host."""
        runtime = self.folder / f"run-{host}"
        runtime.mkdir(mode=0o700, exist_ok=True)
        command = ["tests.deploy.on_host", self.network.space(host), module, *arguments]
        own = {"XDG_RUNTIME_DIR": str(runtime), "STAGEMESH_LOCK_DIR": str(runtime / "locks")}
        process = Process(command, self.environment | own)
        self._started.append(process)
        return process

    def head_on(self, host: str, *arguments: str) -> Process:
        ready = self.folder / f"ready-{len(self._started)}"
        listen = f"{self.network.address(host)}:{PORT}"
        process = self.start_on(
            host, "stagemesh_head", str(self.pipeline), "--listen", listen, "--ready-file", str(ready), *arguments
        )
        eventually("the head serves", lambda: ready.exists() or process.has_ended)
        assert ready.exists(), process.output
        return process

    def worker_on(self, host: str, node_id: str, stage: str, *arguments: str) -> Process:
        """A node that listens on all addresses of its host, and finds out by itself which one to tell the head."""
        return self.start_on(
            host, "stagemesh_worker", "--head", f"head:{PORT}", "--node-id", node_id, "--stage", stage,
            "--listen-host", "0.0.0.0", *arguments,
        )  # fmt: skip

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.relay.close()


class Relay:
    """Carries this process's connections to an address as seen from a namespace.

    A socket belongs to the namespace of the thread that makes it: one thread moves there and makes them.
    """

    def __init__(self, space: str, host: str, port: int) -> None:
        self._space, self._target = space, (host, port)
        started: Future[str] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), daemon=True)
        self._thread.start()
        self.address = started.result(END_S)

    async def _run(self, started: Future[str]) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        try:
            _enter(self._space)
        except OSError as error:
            started.set_exception(error)
            return
        started.set_result(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await self._end.wait()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.wait_for(asyncio.open_connection(*self._target), END_S)
            with contextlib.closing(far_writer):
                ways = [asyncio.create_task(_pump(reader, far_writer)), asyncio.create_task(_pump(far_reader, writer))]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(END_S)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Hosts head, writer, painter and client."""
    made = Network()
    try:
        made.open()
        for last, host in enumerate(("head", "writer", "painter", "client"), start=1):
            made.add(host, last)
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def hosts(folder: Path, pipeline: str) -> Iterator[HostProcesses]:
    """Four hosts, nothing started; at the end no process and no namespace is left."""
    path = folder / "pipeline.yaml"
    path.write_text(pipeline)
    with network() as net:
        mesh = HostProcesses(folder, path, net)
        try:
            yield mesh
        finally:
            mesh.close()


def _enter(space: str) -> None:
    """Move this thread, and no other, to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", space).open() as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns: {space}")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


def _ip(*words: str) -> str:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, timeout=END_S
    )
    return done.stdout


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long it took."""
    started = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - started:.2f} s")

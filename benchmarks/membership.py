"""Membership at size: how long 1,000 replicas on 100 nodes take to register, what their heartbeats cost the head, and
how soon 20 watchers see a change.

    python benchmarks/membership.py

The registry runs in a process of its own with its real gRPC services, and no links, since the replicas are simulated.
The nodes and watchers share this process; its own delays are part of the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from typing import Any

import grpc
import psutil
import uvloop

from stagemesh import __version__
from stagemesh.config import Pipeline, Runtime, Stage
from stagemesh.rpc.options import open_channel
from stagemesh.rpc.server import bind, create_server
from stagemesh.v1 import device_pb2 as device_pb
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import registry_pb2_grpc as registry_rpc
from stagemesh.v1 import replica_pb2 as replica_pb

START_S, DEADLINE_S = 30.0, 120.0
GOALS = {"cpu_percent": 10.0, "change_p50_ms": 20.0, "change_p99_ms": 100.0}


# -- the head's side ------------------------------------------------------------
async def serve(replicas: int) -> None:
    """A registry on a port, until standard input ends."""
    from stagemesh_head.registry.registry import Registry
    from stagemesh_head.services.registry import RegistryServicer

    stage = Stage(name="writer", engine="synthetic", runtime=Runtime(num_replicas=replicas))
    registry = Registry([Pipeline(name="bench", stages=(stage,))])
    server = create_server()
    registry_rpc.add_RegistryServiceServicer_to_server(RegistryServicer(registry), server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    registry.start()
    print(port, flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    await registry.close()
    await server.stop(1.0)


# -- the nodes' side --------------------------------------------------------------
class Node:
    """A node agent that only talks."""

    def __init__(self, number: int, devices: int, target: str) -> None:
        self.name = f"n{number}"
        self.reports: list[replica_pb.ReplicaReport] = []
        self._devices = devices
        self._channel = open_channel(target, own_connection=True)
        self._sequence = 0
        self._lock = asyncio.Lock()
        self._random = random.Random(number)
        self._call: Any = None

    async def join(self) -> None:
        """Join, take the assignments, report READY."""
        self._call = registry_rpc.RegistryServiceStub(self._channel).Join()
        kind = device_pb.DEVICE_KIND_CPU
        hello = registry_pb.Hello(
            contract_version="1",
            software_version=__version__,
            node_id=self.name,
            incarnation="1",
            hostname=self.name,
            host_id=self.name,
            devices=[device_pb.Device(id=f"cpu:{i}", kind=kind, cores=[i]) for i in range(self._devices)],
        )
        await self._call.write(registry_pb.JoinRequest(hello=hello))
        while len(self.reports) < self._devices:
            message = await self._call.read()
            if message is grpc.aio.EOF:
                raise RuntimeError(f"{self.name}: {await self._call.details()}")
            if message.HasField("assignment"):
                assignment = message.assignment
                self.reports.append(
                    replica_pb.ReplicaReport(
                        replica=assignment.replica,
                        pipeline_revision=assignment.pipeline_revision,
                        state=replica_pb.REPLICA_STATE_READY,
                        endpoint=f"127.0.0.1:{1 + assignment.replica.replica_id}",
                        device_ids=[device.id for device in assignment.devices],
                    )
                )
                self.reports[-1].replica.incarnation = "1"
        await self.beat()

    async def beat(self) -> None:
        """One heartbeat with new loads, and its answer."""
        async with self._lock:
            self._sequence += 1
            for report in self.reports:
                report.load.running = self._random.randrange(16)
                report.load.engine_steps += 40
                report.load.since_progress.nanos = self._random.randrange(10**8)
            beat = registry_pb.Heartbeat(sequence=self._sequence, incarnation="1", replicas=self.reports)
            await self._call.write(registry_pb.JoinRequest(heartbeat=beat))
            while not (await self._call.read()).HasField("heartbeat_ack"):
                pass

    async def live(self, interval_s: float) -> None:
        """Heartbeats, out of step with the other nodes."""
        await asyncio.sleep(self._random.random() * interval_s)
        while True:
            started = time.perf_counter()
            await self.beat()
            await asyncio.sleep(max(0.0, interval_s - (time.perf_counter() - started)))

    async def close(self) -> None:
        """Leave."""
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()


class Watchers:
    """Followers that note when they see a replica in a state."""

    def __init__(self, target: str, number: int) -> None:
        self.ready: list[set[int]] = [set() for _ in range(number)]
        self.seen_ms: list[float] = []
        self._ready_news = asyncio.Event()
        self._awaited: tuple[int, int, float] | None = None
        self._waiting = 0
        self._all_saw = asyncio.Event()
        self._channels = [open_channel(target, own_connection=True) for _ in range(number)]
        self.tasks = [asyncio.create_task(self._follow(index)) for index in range(number)]

    async def _follow(self, index: int) -> None:
        stub, ready = registry_rpc.RegistryServiceStub(self._channels[index]), self.ready[index]
        async for message in stub.WatchReplicas(registry_pb.WatchReplicasRequest()):
            self._ready_news.set()
            for status in message.replicas:
                number = status.report.replica.replica_id
                if status.state == replica_pb.REPLICA_STATE_READY:
                    ready.add(number)
                else:
                    ready.discard(number)
                if self._awaited is not None and self._awaited[:2] == (number, status.state):
                    self.seen_ms.append((time.perf_counter() - self._awaited[2]) * 1e3)
                    self._waiting -= 1
                    if self._waiting == 0:
                        self._all_saw.set()

    async def until_ready(self, number: int) -> None:
        """Until every watcher knows of so many READY replicas."""
        while any(len(ready) < number for ready in self.ready):
            self._ready_news.clear()
            await self._ready_news.wait()

    async def time_change(self, node: Node, report: replica_pb.ReplicaReport, state: Any) -> None:
        """Have a node report a new state, and time how soon each watcher sees it."""
        report.state = state
        self._all_saw.clear()
        self._waiting = len(self.ready)
        self._awaited = (report.replica.replica_id, state, time.perf_counter())
        await node.beat()
        await asyncio.wait_for(self._all_saw.wait(), DEADLINE_S)
        self._awaited = None

    async def close(self) -> None:
        """End all watches."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(args: argparse.Namespace, port: int, head: psutil.Process) -> dict[str, float]:
    """All figures."""
    target = f"127.0.0.1:{port}"
    idle_rss = head.memory_info().rss
    per_node = args.replicas // args.nodes
    nodes = [Node(number, per_node, target) for number in range(args.nodes)]
    watchers = Watchers(target, args.watchers)
    life: list[asyncio.Task[None]] = []
    try:
        started = time.perf_counter()
        await asyncio.wait_for(asyncio.gather(*(node.join() for node in nodes)), DEADLINE_S)
        await asyncio.wait_for(watchers.until_ready(per_node * args.nodes), DEADLINE_S)
        registration_s = time.perf_counter() - started
        life = [asyncio.create_task(node.live(1.0)) for node in nodes]
        await asyncio.sleep(2.0)
        cpu, own, wall = sum(head.cpu_times()[:2]), time.process_time(), time.perf_counter()
        await asyncio.sleep(args.seconds)
        wall = time.perf_counter() - wall
        cpu, own = sum(head.cpu_times()[:2]) - cpu, time.process_time() - own
        chooser = random.Random(0)
        for _ in range(args.changes):
            node = chooser.choice(nodes)
            report = chooser.choice(node.reports)
            for state in (replica_pb.REPLICA_STATE_SUSPECT, replica_pb.REPLICA_STATE_READY):
                await watchers.time_change(node, report, state)
                await asyncio.sleep(0.02 + 0.1 * chooser.random())
        failed = [task for task in (*life, *watchers.tasks) if task.done()]
        if failed:
            failed[0].result()
            raise RuntimeError("a node or a watcher ended early")
        return {
            "registration_s": registration_s,
            "cpu_percent": 100 * cpu / wall,
            "generator_cpu_percent": 100 * own / wall,
            "change_p50_ms": percentile(watchers.seen_ms, 0.5),
            "change_p99_ms": percentile(watchers.seen_ms, 0.99),
            "change_max_ms": max(watchers.seen_ms),
            "rss_idle_mb": idle_rss / 1e6,
            "rss_mb": head.memory_info().rss / 1e6,
        }
    finally:
        for task in life:
            task.cancel()
        await asyncio.gather(*life, return_exceptions=True)
        await watchers.close()
        for node in nodes:
            await node.close()


async def run(args: argparse.Namespace) -> dict[str, float]:
    """Start the registry's process, measure, end it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        *("--serve", "--replicas", str(args.replicas)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        return await measure(args, int(line), psutil.Process(process.pid))
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()


def main() -> None:
    """Print the figures; exit 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--replicas", type=int, default=1_000, help="on all nodes together")
    parser.add_argument("--watchers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0, help="of steady heartbeats, one a second and node")
    parser.add_argument("--changes", type=int, default=50, help="replicas that turn SUSPECT and READY again")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    uvloop.install()
    if args.serve:
        logging.basicConfig(level=logging.ERROR)  # a thousand replicas that leave at the end
        asyncio.run(serve(args.replicas))
        return
    figures = asyncio.run(run(args))
    if args.json:
        print(json.dumps(figures))
    else:
        size = f"{args.replicas} replicas on {args.nodes} nodes, {args.watchers} watchers"
        print(f"{size}\n{'':34}{'measured':>10}{'goal':>10}")
        for name, label, unit in (
            ("registration_s", "all registered and READY", "s"),
            ("cpu_percent", "CPU of the head, heartbeats at 1 s", "%"),
            ("generator_cpu_percent", "CPU of nodes and watchers", "%"),
            ("change_p50_ms", "a change seen by a watcher, p50", "ms"),
            ("change_p99_ms", "a change seen by a watcher, p99", "ms"),
            ("change_max_ms", "a change seen by a watcher, max", "ms"),
            ("rss_idle_mb", "RSS of the head, empty", "MB"),
            ("rss_mb", "RSS of the head, full", "MB"),
        ):
            goal = f"< {GOALS[name]:g}" if name in GOALS else ""
            print(f"{label:34}{figures[name]:>10.1f}{goal:>10} {unit}")
    if any(figures[name] >= goal for name, goal in GOALS.items()):
        sys.exit(1)


if __name__ == "__main__":
    main()

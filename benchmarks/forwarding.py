"""Tokens through the head: a synthetic replica -> a head -> a client, side by side with two bare gRPC hops.

    python benchmarks/forwarding.py                 # 64 streams of 100 tokens, as fast as they go
    python benchmarks/forwarding.py --paced 50      # 256 streams of 50 tokens a second: is every token in time?
    python benchmarks/forwarding.py --idle          # one request at a time: what the head adds to the first token

Idle rounds also call the replica without a head (`direct`), over a stream such as a head has.
The bare reference is three processes too: grpc.aio servers on uvloop, one message a token, no logic at all. Rounds of
both alternate in one run on the same cores, since absolute figures drift with the machine; the ratio is what counts.
Processes of the mesh are the real ones: `stagemesh head`, and `stagemesh worker` with its replica.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
import uvloop
from forwarding_direct import Direct

from stagemesh.rpc.options import CHANNEL_OPTIONS, SERVER_OPTIONS
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import inference_pb2_grpc as inference_rpc
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb

START_S = 60.0
ROUND_S = 300.0
CHANNELS = 4
BARE = "/bare.Echo/Generate"
WARM_UP_REQUESTS = 64


# ------------------------------------------------------------------ bare processes
def bare_stub(channel: grpc.aio.Channel) -> Any:
    """One request, a stream of one message a token."""
    return channel.unary_stream(
        BARE,
        request_serializer=frame_pb.Usage.SerializeToString,
        response_deserializer=frame_pb.TextDelta.FromString,
    )


async def bare_server(behaviour: Any) -> None:
    """Serve `behaviour`, and print the port."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler = grpc.unary_stream_rpc_method_handler(
        behaviour,
        request_deserializer=frame_pb.Usage.FromString,
        response_serializer=frame_pb.TextDelta.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Echo", {"Generate": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def bare_worker(pace: float) -> None:
    """Makes tokens, so many a second of each stream; 0: as fast as it can."""

    async def generate(request: frame_pb.Usage, context: Any) -> Any:
        start = time.perf_counter()
        for number in range(request.completion_tokens):
            if pace:
                await asyncio.sleep(start + number / pace - time.perf_counter())
            yield frame_pb.TextDelta(text="token ", token_ids=[5])

    await bare_server(generate)


async def bare_head(worker: str) -> None:
    """Forwards them."""
    stub = bare_stub(grpc.aio.insecure_channel(worker, options=CHANNEL_OPTIONS))

    async def generate(request: frame_pb.Usage, context: Any) -> Any:
        async for message in stub(request):
            yield message

    await bare_server(generate)


# ------------------------------------------------------------------ load generator
class Load:
    """Runs requests against one target, and measures."""

    def __init__(self, kind: str, address: str, tokens: int) -> None:
        options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self.channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(CHANNELS)]
        self.tokens = tokens
        self.one = {"bare": self._bare, "mesh": self._mesh, "direct": self._direct}[kind]
        self.direct = Direct(address) if kind == "direct" else None
        stub = bare_stub if kind == "bare" else lambda channel: inference_rpc.InferenceServiceStub(channel).Generate
        self.stubs = [stub(channel) for channel in self.channels]
        self.received = self.messages = 0
        self.first_token_s: list[float] = []
        self.gaps_s: list[float] = []
        """Time between a token's due moment and its arrival, for paced runs."""
        self.pace_s = 0.0

    async def _bare(self, number: int) -> None:
        await self._read(self.stubs[number % CHANNELS](frame_pb.Usage(completion_tokens=self.tokens)), lambda m: m)

    async def _mesh(self, number: int) -> None:
        llm = sampling_pb.LlmSamplingParams(max_tokens=self.tokens, temperature=0, ignore_eos=True)
        request = inference_pb.GenerateRequest(prompt=prompt_pb.Prompt(text=f"request {number}"))
        request.sampling.add(params=sampling_pb.SamplingParams(llm=llm))
        await self._read(self.stubs[number % CHANNELS](request), lambda message: message.frame.text)

    async def _direct(self, number: int) -> None:
        assert self.direct is not None
        await self._read(self.direct.generate(f"request {number}", self.tokens), lambda m: m)

    async def _read(self, call: Any, text_of: Any) -> None:
        start, count = time.perf_counter(), 0
        first_at = 0.0
        async for message in call:
            new = len(text_of(message).token_ids)
            if not new:
                continue
            now = time.perf_counter()
            if not count:
                first_at = now
                self.first_token_s.append(now - start)
            elif self.pace_s:
                # How late the oldest of the new tokens is against the pace of the first one.
                self.gaps_s.append(now - first_at - count * self.pace_s)
            count += new
            self.messages += 1
        if count != self.tokens:
            raise RuntimeError(f"{count} tokens instead of {self.tokens}")
        self.received += count

    async def run(self, requests: int, concurrency: int) -> dict[str, Any]:
        """Figures of `requests` requests, so many at a time."""
        # Paced streams start one after the other over the time that one of them takes: what is asked is what a steady
        # load is like, not what so many starts at one moment cost.
        apart_s = self.tokens * self.pace_s / concurrency
        numbers = iter(range(requests))

        async def one_after_the_other(place: int) -> None:
            await asyncio.sleep(place * apart_s)
            for number in numbers:
                await self.one(number)

        self.received = self.messages = 0
        self.first_token_s, self.gaps_s = [], []
        start = time.perf_counter()
        await asyncio.gather(*(one_after_the_other(place) for place in range(concurrency)))
        seconds = time.perf_counter() - start
        return {
            "tokens_per_s": self.received / seconds,
            "messages_per_s": self.messages / seconds,
            "tokens": self.received,
            "first_token_ms": percentiles(self.first_token_s),
            "late_ms": percentiles(self.gaps_s),
            "seconds": seconds,
        }


async def load(
    kind: str, address: str, tokens: int, concurrency: int, requests: int, pace: float, processes: dict[str, int]
) -> None:
    """Warm up, measure once, print JSON. `processes` are those whose CPU time counts, by their part."""
    target = Load(kind, address, tokens)
    watched = {name: psutil.Process(pid) for name, pid in processes.items()} | {"client": psutil.Process()}
    await target.run(min(WARM_UP_REQUESTS, requests), concurrency)
    target.pace_s = 1.0 / pace if pace else 0.0
    before = {name: sum(process.cpu_times()[:2]) for name, process in watched.items()}
    figures = await target.run(requests, concurrency)
    used = {name: sum(process.cpu_times()[:2]) - before[name] for name, process in watched.items()}
    figures["us_per_token"] = {name: seconds / figures["tokens"] * 1e6 for name, seconds in used.items()}
    # Of a paced run, at the full pace: the first and the last streams run beside fewer others.
    seconds = figures["tokens"] / (concurrency * pace) if pace else figures["seconds"]
    figures["head_core"] = used["head"] / seconds
    print(json.dumps(figures), flush=True)


def percentiles(values: list[float]) -> dict[str, float]:
    """p50 and p99 in ms."""
    ordered = sorted(values) or [0.0]
    return {name: ordered[int((len(ordered) - 1) * q)] * 1e3 for name, q in (("p50", 0.5), ("p99", 0.99))}


# ------------------------------------------------------------------ the run
class Processes:
    """What the run starts, and ends."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def spawn(self, *command: str, log: Path | None = None) -> subprocess.Popen[str]:
        errors = log.open("w") if log is not None else None
        process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE if log is None else errors, stderr=errors, text=True
        )
        self.started.append(process)
        return process

    def role(self, *arguments: str) -> subprocess.Popen[str]:
        return self.spawn(__file__, "--role", *arguments)

    def stop(self) -> None:
        for process in reversed(self.started):
            if process.poll() is None:
                process.terminate()
        for process in self.started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start_bare(processes: Processes, pace: float) -> tuple[str, dict[str, int]]:
    """Address of the bare head, and the processes."""
    worker = processes.role("bare-worker", str(pace))
    assert worker.stdout is not None
    head = processes.role("bare-head", f"127.0.0.1:{worker.stdout.readline().strip()}")
    assert head.stdout is not None
    return f"127.0.0.1:{head.stdout.readline().strip()}", {"head": head.pid, "worker": worker.pid}


def start_mesh(processes: Processes, folder: Path, pace: float) -> tuple[str, dict[str, int]]:
    """Address of a head whose one replica is ready, and the processes."""
    pipeline = folder / "forwarding.yaml"
    stage = {"name": "writer", "engine": "synthetic", "engine_args": {"tokens_per_second": pace}}
    pipeline.write_text(json.dumps({"name": "forwarding", "stages": [stage]}))
    ready = folder / "ready"
    head = processes.spawn(
        "-m", "stagemesh_head", str(pipeline), "--listen", "127.0.0.1:0", "--ready-file", str(ready),
        log=folder / "head.log",
    )  # fmt: skip
    wait_for(ready.exists, "the head")
    address = ready.read_text().strip()
    cores = len(psutil.Process().cpu_affinity())
    node = processes.spawn(
        "-m", "stagemesh_worker", "--head", address, "--cores-per-device", str(cores), log=folder / "worker.log"
    )  # fmt: skip
    channel = grpc.insecure_channel(address)
    stub = inference_rpc.InferenceServiceStub(channel)
    wait_for(lambda: not stub.GetPipeline(inference_pb.GetPipelineRequest()).problems, "the replica")
    channel.close()
    (replica,) = psutil.Process(node.pid).children()
    return address, {"head": head.pid, "worker": replica.pid}


def wait_for(condition: Any, what: str) -> None:
    """Poll until something that another process does is done."""
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not come up within {START_S:g} s")
        time.sleep(0.05)


def main() -> None:
    """Run one of the three comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, help="requests at a time (64; paced: 256; idle: 1)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of a request")
    parser.add_argument("--requests", type=int, help="requests of a round of the mesh (2000; paced: 1024; idle: 200)")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of rounds")
    parser.add_argument("--paced", type=float, default=0.0, metavar="RATE", help="tokens a second of each stream")
    parser.add_argument("--idle", action="store_true", help="one request at a time")
    parser.add_argument("--no-bare", action="store_true", help="leave the reference out")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON at the end")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        uvloop.install()
        name, *arguments = options.role
        if name == "load":
            kind, address, tokens, concurrency, requests, pace, watched = arguments
            asyncio.run(
                load(kind, address, int(tokens), int(concurrency), int(requests), float(pace), json.loads(watched))
            )
        elif name == "bare-head":
            asyncio.run(bare_head(*arguments))
        else:
            asyncio.run(bare_worker(float(*arguments)))
        return
    streams = options.streams or (1 if options.idle else 256 if options.paced else 64)
    requests = options.requests or (200 if options.idle else 4 * streams if options.paced else 2000)
    processes = Processes()
    results: dict[str, list[dict[str, Any]]] = {"bare": [], "mesh": [], "direct": []}
    with tempfile.TemporaryDirectory(prefix="stagemesh-forwarding-") as folder:
        try:
            targets = {} if options.no_bare else {"bare": start_bare(processes, options.paced)}
            targets["mesh"] = start_mesh(processes, Path(folder), options.paced)
            if options.idle:
                targets["direct"] = targets["mesh"]
            for number in range(options.rounds):
                for kind, (address, watched) in targets.items():
                    # As fast as it goes, the bare one needs fewer requests for a round as long.
                    is_shorter = kind == "bare" and not (options.idle or options.paced)
                    count = max(streams, requests // 5) if is_shorter else requests
                    loader = processes.role(
                        "load",
                        kind,
                        address,
                        str(options.tokens),
                        str(streams),
                        str(count),
                        str(options.paced),
                        json.dumps(watched),
                    )
                    output, _ = loader.communicate(timeout=ROUND_S)
                    if loader.returncode:
                        raise SystemExit(f"the load generator failed on {kind}")
                    figures = json.loads(output)
                    results[kind].append(figures)
                    print(f"round {number + 1} {kind}: {shown(figures, options.paced)}", flush=True)
        finally:
            processes.stop()
    report(results, options.paced)
    if options.json:
        print(json.dumps(results))


def shown(figures: dict[str, Any], pace: float) -> str:
    """One round in one line."""
    first = figures["first_token_ms"]
    cpu = ", ".join(f"{name} {value:.1f}" for name, value in figures["us_per_token"].items())
    late = f", late p50 {figures['late_ms']['p50']:.1f} p99 {figures['late_ms']['p99']:.1f} ms" if pace else ""
    return (
        f"{figures['tokens_per_s']:,.0f} tokens/s in {figures['messages_per_s']:,.0f} messages/s, first token p50 "
        f"{first['p50']:.1f} p99 {first['p99']:.1f} ms, CPU us a token: {cpu} "
        f"(head {figures['head_core']:.0%} of a core){late}"
    )


def report(results: dict[str, list[dict[str, Any]]], pace: float) -> None:
    """Medians, and the ratio of the pairs."""
    for kind, rounds in results.items():
        if rounds:
            middle = sorted(rounds, key=lambda one: float(one["tokens_per_s"]))[len(rounds) // 2]
            print(f"median {kind}: {shown(middle, pace)}")
    added = [
        [mesh["first_token_ms"][name] - direct["first_token_ms"][name] for name in ("p50", "p99")]
        for mesh, direct in zip(results["mesh"], results["direct"], strict=False)
    ]
    if added:
        p50, p99 = (statistics.median(values) for values in zip(*added, strict=True))
        print(f"mesh - direct: the head adds {p50:.2f} ms to the first token (p50), {p99:.2f} ms (p99)")
        return
    pairs = list(zip(results["bare"], results["mesh"], strict=False))
    if pairs:
        cpu = statistics.median(mesh["us_per_token"]["head"] / bare["us_per_token"]["head"] for bare, mesh in pairs)
        if pace:
            print(f"mesh / bare: {cpu:.2f} x the head's CPU a token")
            return
        ratios = sorted(mesh["tokens_per_s"] / bare["tokens_per_s"] for bare, mesh in pairs)
        ratio, spread = statistics.median(ratios), f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"mesh / bare: {ratio:.2f} x the tokens a second ({spread}), {cpu:.2f} x the head's CPU a token")
        # On a machine that other work keeps busy, CPU time says more than the clock.
        total = statistics.median(
            sum(bare["us_per_token"].values()) / sum(mesh["us_per_token"].values()) for bare, mesh in pairs
        )
        print(f"CPU a token of all three processes together: bare / mesh {total:.2f}")


if __name__ == "__main__":
    main()

"""Load-balancing policies side by side, in simulated meshes: heavy-tailed work, stale load reports, several gateways,
replicas of unequal speed, prompts with shared beginnings.

    python benchmarks/routing.py                                # the table
    python benchmarks/routing.py --plot docs/images/routing.svg # and p99 against load, drawn

The policies are the head's own objects; only the replicas and the clock are simulated. Every policy gets the very same
requests, and a seed gives the same figures each time.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from routing_plot import draw

from stagemesh_head.routing.policies import Policy, PowerOfTwo, Random, RouteHint
from stagemesh_head.routing.registry import BUILT_IN, make_policy

WARM_UP = 0.1
"""Share of the requests, the first ones, that count in no figure."""
TAIL, SHORTEST_S, LONGEST_S = 1.3, 0.2, 20.0
"""Exponent and bounds of the Pareto law that decode times follow."""
PREFIX_S, OWN_PREFILL_S = 0.5, 0.05
"""Prefill of a prompt's beginning, which a cache may spare, and of its rest, at speed 1."""
SAMPLE_S = 0.25


@dataclass(frozen=True, slots=True)
class World:
    """A mesh and its load."""

    name: str
    gateways: int = 1
    speeds: tuple[float, ...] = (1.0,) * 16
    """One replica each; a replica of speed 0.5 takes twice as long."""
    slots: int = 4
    """Tasks that a replica runs at once; the others wait there in order."""
    prefixes: int = 0
    """Prompt beginnings in use, by Zipf's law; 0: every prompt begins in its own way."""
    cached: int = 24
    """Beginnings that a replica's cache keeps, the last used ones."""
    load: float = 0.8
    """Work that comes, as a share of what all replicas can do when no cache helps."""
    report_s: float = 1.0
    """Between two load reports of a replica."""
    delay_s: float = 0.5
    """Age of a report when the gateways get it."""


SLOW_THIRD = (1.0,) * 11 + (0.5,) * 5
WORLDS = (
    World("one head"),
    World("8 gateways", gateways=8),
    World("32 gateways", gateways=32),
    World("unequal replicas", gateways=8, speeds=SLOW_THIRD),
    World("shared prefixes", gateways=8, speeds=SLOW_THIRD, prefixes=200),
    World("shared prefixes, 32 gateways", gateways=32, speeds=SLOW_THIRD, prefixes=200),
)
PLOTTED = ("one head", "32 gateways", "shared prefixes")
PLOTTED_LOADS = (0.5, 0.6, 0.7, 0.8, 0.9)


# -- the load -----------------------------------------------------------------
@dataclass(slots=True)
class Request:
    """One task, at one of the gateways."""

    at: float
    gateway: int
    decode_s: float
    hint: RouteHint
    chosen: int = -1
    done_at: float = 0.0
    was_hit: bool = False


def requests_of(world: World, count: int, seed: int) -> list[Request]:
    """Poisson arrivals whose work is exactly `world.load` of the capacity."""
    rng = random.Random(seed)
    shrink = 1 - (SHORTEST_S / LONGEST_S) ** TAIL
    decode = [SHORTEST_S / (1 - rng.random() * shrink) ** (1 / TAIL) for _ in range(count)]
    work = sum(decode) + count * (PREFIX_S + OWN_PREFILL_S)
    span = work / (world.load * world.slots * sum(world.speeds))
    gaps = [rng.expovariate(1.0) for _ in range(count)]
    scale = span / sum(gaps)
    arrivals = accumulate(gap * scale for gap in gaps)
    weights = list(accumulate(1 / rank for rank in range(1, world.prefixes + 1)))
    made = []
    for number, (at, decode_s) in enumerate(zip(arrivals, decode, strict=True)):
        prefix = rng.choices(range(world.prefixes), cum_weights=weights)[0] if weights else number
        hint = RouteHint(request_id=str(number), prefix=b"beginning %d" % prefix)
        made.append(Request(at, rng.randrange(world.gateways), decode_s, hint))
    return made


# -- the mesh -----------------------------------------------------------------
@dataclass(slots=True)
class Seat:
    """A replica as one gateway sees it: what policies choose from."""

    replica_id: int
    inflight: int = 0
    reported: int = 0
    last_pick: int = 0


@dataclass(slots=True)
class Replica:
    """Some slots, a queue and a prefix cache."""

    speed: float
    slots: int
    cached: int
    running: int = 0
    queue: deque[Request] = field(default_factory=deque)
    cache: dict[bytes, float] = field(default_factory=dict)
    """When each beginning was computed, the last used one at the end."""

    @property
    def tasks(self) -> int:
        """Running and waiting."""
        return self.running + len(self.queue)

    def start(self, request: Request, now: float) -> float:
        """Take a slot; the time at which the task is done."""
        prefix = request.hint.prefix
        computed_at = self.cache.pop(prefix, None)
        request.was_hit = computed_at is not None and computed_at <= now
        prefill_s = OWN_PREFILL_S + (0.0 if request.was_hit else PREFIX_S)
        # A beginning that another task computes at the moment helps only those that start after it.
        self.cache[prefix] = now + prefill_s / self.speed if computed_at is None else computed_at
        if len(self.cache) > self.cached:
            del self.cache[next(iter(self.cache))]
        self.running += 1
        return now + (prefill_s + request.decode_s) / self.speed


class Mesh:
    """Runs a list of requests through gateways, each with a policy object and a view of its own."""

    def __init__(self, world: World, policy: str, seed: int) -> None:
        self._world = world
        self._policies = [policy_of(policy, seed * 1000 + number) for number in range(world.gateways)]
        self.views = [[Seat(i) for i in range(len(world.speeds))] for _ in range(world.gateways)]
        self._picks = [0] * world.gateways
        self.replicas = [Replica(speed, world.slots, world.cached) for speed in world.speeds]
        self.samples: list[tuple[int, int, int]] = []
        """Now and then: tasks on the fullest replica, tasks on all, and how many of these run."""
        self._events: list[tuple[float, int, str, object]] = []
        self._count = 0

    def run(self, requests: Sequence[Request]) -> None:
        """Until all are done."""
        last = requests[-1].at
        for request in requests:
            self._at(request.at, "arrives", request)
        for number in range(len(self.replicas)):
            self._at(self._world.report_s * number / len(self.replicas), "reports", number)
        self._at(WARM_UP * last, "sample", None)
        while self._events:
            now, _, kind, subject = heapq.heappop(self._events)
            getattr(self, f"_{kind}")(now, subject, last)

    def _at(self, when: float, kind: str, subject: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, kind, subject))

    def _arrives(self, now: float, request: Request, last: float) -> None:
        gateway = request.gateway
        seat = self._policies[gateway].choose(self.views[gateway], request.hint)
        self._picks[gateway] += 1
        seat.last_pick = self._picks[gateway]
        seat.inflight += 1
        request.chosen = seat.replica_id
        replica = self.replicas[seat.replica_id]
        if replica.running < replica.slots:
            self._at(replica.start(request, now), "done", request)
        else:
            replica.queue.append(request)

    def _done(self, now: float, request: Request, last: float) -> None:
        request.done_at = now
        self.views[request.gateway][request.chosen].inflight -= 1
        replica = self.replicas[request.chosen]
        replica.running -= 1
        if replica.queue:
            waiting = replica.queue.popleft()
            self._at(replica.start(waiting, now), "done", waiting)

    def _reports(self, now: float, number: int, last: float) -> None:
        self._at(now + self._world.delay_s, "hears", (number, self.replicas[number].tasks))
        if now < last:
            self._at(now + self._world.report_s, "reports", number)

    def _hears(self, now: float, report: tuple[int, int], last: float) -> None:
        number, tasks = report
        for view in self.views:
            view[number].reported = tasks

    def _sample(self, now: float, _: None, last: float) -> None:
        tasks = [replica.tasks for replica in self.replicas]
        self.samples.append((max(tasks), sum(tasks), sum(replica.running for replica in self.replicas)))
        if now < last:
            self._at(now + SAMPLE_S, "sample", None)


def policy_of(name: str, seed: int) -> Policy:
    """A new policy; those that draw at random draw the same each time."""
    factory = BUILT_IN.get(name)
    return factory(seed) if factory in (Random, PowerOfTwo) else make_policy(name)  # type: ignore[call-arg, operator]


# -- figures ------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Figures:
    """What one policy did in one world."""

    p50_s: float
    p99_s: float
    utilisation: float
    """Share of all slots that were in use, on average, while requests came."""
    hit_rate: float
    imbalance: float
    """Tasks on the fullest replica, over the mean of all replicas."""


def measure(world: World, policy: str, count: int, seeds: Iterable[int]) -> Figures:
    """Figures over the requests of all seeds together."""
    latencies: list[float] = []
    samples: list[tuple[int, int, int]] = []
    hits = 0
    for seed in seeds:
        requests = requests_of(world, count, seed)
        mesh = Mesh(world, policy, seed)
        mesh.run(requests)
        samples += mesh.samples
        counted = requests[int(WARM_UP * count) :]
        latencies += [request.done_at - request.at for request in counted]
        hits += sum(request.was_hit for request in counted)
    fullest, tasks, running = (sum(column) for column in zip(*samples, strict=True))
    latencies.sort()
    return Figures(
        p50_s=latencies[len(latencies) // 2],
        p99_s=latencies[int(len(latencies) * 0.99)],
        utilisation=running / (len(samples) * world.slots * len(world.speeds)),
        hit_rate=hits / len(latencies),
        imbalance=fullest * len(world.speeds) / tasks,
    )


def print_table(policies: Sequence[str], count: int, seeds: range) -> None:
    """Every policy in every world, as Markdown."""
    print("| world | policy | p50 s | p99 s | utilisation | prefix hits | imbalance |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for world in WORLDS:
        for policy in policies:
            f = measure(world, policy, count, seeds)
            print(
                f"| {world.name} | {policy} | {f.p50_s:.2f} | {f.p99_s:.2f} | {f.utilisation:.0%} | "
                f"{f.hit_rate:.0%} | {f.imbalance:.2f} |",
                flush=True,
            )


def plot(policies: Sequence[str], count: int, seeds: range) -> str:
    """p99 against load in the plotted worlds, as SVG."""
    panels = {
        world.name: {
            policy: [(load, measure(replace(world, load=load), policy, count, seeds).p99_s) for load in PLOTTED_LOADS]
            for policy in policies
        }
        for world in WORLDS
        if world.name in PLOTTED
    }
    title = "99th percentile of latency against load (simulated; lines end where they leave the plot)"
    return draw(title, panels, x_label="load, no cache counted", y_label="p99 latency (s)", y_max=16, y_step=4)


def main() -> None:
    """Print the table, and draw the plot when asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000, help="of one seed")
    parser.add_argument("--seeds", type=int, default=3, help="runs that are counted together")
    parser.add_argument("--policy", action="append", help="only this one, a plug-in's too; several times for several")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw p99 against load into this SVG file")
    arguments = parser.parse_args()
    if arguments.requests < 100 or arguments.seeds < 1:
        parser.error("--requests must be 100 or more, and --seeds 1 or more")
    policies = arguments.policy or list(BUILT_IN)
    for policy in policies:
        try:
            make_policy(policy)
        except ValueError as error:
            parser.error(str(error))
    seeds = range(arguments.seeds)
    print_table(policies, arguments.requests, seeds)
    if arguments.plot:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        arguments.plot.write_text(plot(policies, arguments.requests, seeds))


if __name__ == "__main__":
    main()

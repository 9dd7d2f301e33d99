"""Prometheus metrics of a head. Gauges are read from the rooms at every scrape; the hot path knows nothing of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter as Tally
from collections.abc import Iterable, Sequence
from time import monotonic
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from stagemesh.config import Pipeline
from stagemesh_head.gateway import Gateway
from stagemesh_head.orchestration.run import RequestRun
from stagemesh_head.orchestration.task import Task
from stagemesh_head.registry.registry import Registry

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
LAG_PERIOD_S = 0.25
SCRAPE_S = 10.0
"""For a scraper to say what it wants, and to read the answer: each one has a thread."""


class HeadMetrics:
    """What a head counts, and where it can be read."""

    def __init__(self, pipelines: Sequence[Pipeline], registry: Registry, gateway: Gateway) -> None:
        self.registry = CollectorRegistry()
        self._server: WSGIServer | None = None
        labels = {"registry": self.registry}
        self._requests = Counter(
            "stagemesh_requests", "Requests that ended, by outcome.", ["pipeline", "outcome"], **labels
        )
        self._seconds = Histogram(
            "stagemesh_request_seconds", "From arrival to the end.", ["pipeline"], buckets=SECONDS, **labels
        )
        self._first = Histogram(
            "stagemesh_first_output_seconds", "From a task's submission to its first output.",
            ["pipeline", "stage", "modality"], buckets=SECONDS, **labels,
        )  # fmt: skip
        self._queue = Histogram(
            "stagemesh_queue_seconds", "Wait of a task for a replica.", ["pipeline", "stage"], buckets=SECONDS, **labels
        )
        self._engine_queue = Histogram(
            "stagemesh_engine_queue_seconds", "Wait of a task inside its replica.", ["pipeline", "stage"],
            buckets=SECONDS, **labels,
        )  # fmt: skip
        self._stage = Histogram(
            "stagemesh_stage_seconds", "From a task's submission to its end.", ["pipeline", "stage"],
            buckets=SECONDS, **labels,
        )  # fmt: skip
        self._transfer = Histogram(
            "stagemesh_transfer_seconds", "Bringing a task the outputs of the stages before.", ["pipeline", "stage"],
            buckets=SECONDS, **labels,
        )  # fmt: skip
        self._work = {
            name: Counter(f"stagemesh_{name}", text, ["pipeline", "stage"], **labels)
            for name, text in (
                ("prompt_tokens", "Tokens of prompts."),
                ("generation_tokens", "Tokens generated."),
                ("diffusion_steps", "Denoising steps made."),
                ("images", "Pictures made."),
                ("audio_seconds", "Seconds of sound made."),
            )
        }
        self._retries = Counter(
            "stagemesh_task_retries", "Attempts of tasks after a loss.", ["pipeline", "stage"], **labels
        )
        self._recoveries = Counter(
            "stagemesh_recoveries", "Tasks that survived a loss, by how.", ["pipeline", "stage", "mode"], **labels
        )
        self._lag = Gauge("stagemesh_event_loop_lag_seconds", "How late the head's event loop is.", **labels)
        self.registry.register(_Rooms(registry, gateway, pipelines))
        gateway.orchestrator.on_ended = self.request_ended

    def request_ended(self, run: RequestRun) -> None:
        """Count a request whose stream has its end."""
        pipeline = run.plan.pipeline.name
        self._requests.labels(pipeline, run.stream.outcome).inc()
        self._seconds.labels(pipeline).observe(monotonic() - run.started_at)
        for task in run.machine.tasks.values():
            if task.attempt:
                self._task_ended(pipeline, task)

    def _task_ended(self, pipeline: str, task: Task) -> None:
        names, times = (pipeline, task.stage_name), task.times
        self._queue.labels(*names).observe(times.queue_s)
        self._engine_queue.labels(*names).observe(times.engine_queue_s)
        self._transfer.labels(*names).observe(times.transfer_s)
        if times.first_output_at:
            modality = task.planned.stage.final_output_type
            self._first.labels(*names, modality).observe(times.first_output_at - times.submitted_at)
        if task.attempt > 1:
            self._retries.labels(*names).inc(task.attempt - 1)
        if task.recovery:
            self._recoveries.labels(*names, task.recovery).inc()
        if task.finished is None:
            return
        self._stage.labels(*names).observe(task.finished.timings.total.ToNanoseconds() / 1e9)
        usage = task.finished.usage
        for name, amount in (
            ("prompt_tokens", usage.prompt_tokens), ("generation_tokens", usage.completion_tokens),
            ("diffusion_steps", usage.diffusion_steps), ("images", usage.images),
            ("audio_seconds", usage.audio_seconds),
        ):  # fmt: skip
            if amount:
                self._work[name].labels(*names).inc(amount)

    async def watch_lag(self) -> None:
        """Measure the event loop until cancelled."""
        while True:
            before = monotonic()
            await asyncio.sleep(LAG_PERIOD_S)
            self._lag.set(max(0.0, monotonic() - before - LAG_PERIOD_S))

    def close(self) -> None:
        """Serve no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def serve(self, address: str) -> int:
        """Serve `/metrics` on host:port; returns the port. Raises OSError when it cannot be had."""
        host, _, port = address.rpartition(":")
        server, _thread = start_http_server(int(port), addr=host.strip("[]"), registry=self.registry)
        server.RequestHandlerClass = _Scrape
        self._server = server
        return int(server.server_address[1])


class _Scrape(WSGIRequestHandler):
    """One connection of whoever reads the metrics, ended when it says nothing, and no reason for a traceback."""

    timeout = SCRAPE_S

    def handle(self) -> None:
        """Answer it. A peer that is silent or gone is no error of ours."""
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""


class _Rooms:
    """Gauges and counters that the rooms keep anyway."""

    def __init__(self, registry: Registry, gateway: Gateway, pipelines: Sequence[Pipeline]) -> None:
        self._registry, self._gateway, self._pipelines = registry, gateway, pipelines

    def collect(self) -> Iterable[Metric]:
        """Called by the exporter at every scrape."""
        yield from self._requests()
        yield from self._stages()
        yield from self._nodes()
        events = CounterMetricFamily("stagemesh_events", "What happened to nodes and replicas.", labels=["type"])
        for kind, count in list(self._registry.events.counts.items()):
            events.add_metric([kind], count)
        yield events

    def _requests(self) -> Iterable[Metric]:
        running = GaugeMetricFamily("stagemesh_requests_running", "Requests in flight.", labels=["pipeline"])
        waiting = GaugeMetricFamily("stagemesh_requests_waiting", "Requests not yet admitted.", labels=["pipeline"])
        refused = CounterMetricFamily("stagemesh_admission_refusals", "Requests refused.", labels=["pipeline"])
        for name, admission in self._gateway.orchestrator.admissions.items():
            running.add_metric([name], admission.running)
            waiting.add_metric([name], admission.waiting)
            refused.add_metric([name], admission.refused)
        return running, waiting, refused

    def _stages(self) -> Iterable[Metric]:
        waiting = GaugeMetricFamily(
            "stagemesh_stage_waiting_tasks", "Tasks that wait for a replica.", labels=["pipeline", "stage"]
        )
        inflight = GaugeMetricFamily(
            "stagemesh_stage_inflight_tasks", "Tasks that replicas work on.", labels=["pipeline", "stage"]
        )
        ready = GaugeMetricFamily("stagemesh_stage_ready_replicas", "Replicas READY.", labels=["pipeline", "stage"])
        for pipeline in self._pipelines:
            for pool in self._gateway.pools.of_pipeline(pipeline.name):
                names = [pipeline.name, pool.stage]
                waiting.add_metric(names, pool.waiting)
                inflight.add_metric(names, pool.inflight)
                ready.add_metric(names, pool.ready)
        return waiting, inflight, ready

    def _nodes(self) -> Iterable[Metric]:
        nodes = GaugeMetricFamily("stagemesh_nodes", "Nodes by state.", labels=["state"])
        ages = GaugeMetricFamily("stagemesh_lease_age_seconds", "Since a node's last heartbeat.", labels=["node"])
        replicas = GaugeMetricFamily("stagemesh_replicas", "Replicas by state.", labels=["pipeline", "stage", "state"])
        names = ["pipeline", "stage", "replica"]
        running = GaugeMetricFamily("stagemesh_replica_running_tasks", "Tasks in a replica's engine.", labels=names)
        queued = GaugeMetricFamily("stagemesh_replica_waiting_tasks", "Tasks waiting in a replica.", labels=names)
        memory = GaugeMetricFamily("stagemesh_replica_memory_bytes", "Resident memory of a replica.", labels=names)
        prompts = CounterMetricFamily(
            "stagemesh_replica_prompt_tokens", "Prompt tokens, by where their KV blocks came from.",
            labels=[*names, "source"],
        )  # fmt: skip
        states: Tally[str] = Tally()
        now = self._registry.clock()
        for node in list(self._registry.machine.state.nodes.values()):
            states[node.state.name.lower()] += 1
            if node.gone_at is None:
                ages.add_metric([node.node_id], now - node.last_heartbeat)
        for state, count in states.items():
            nodes.add_metric([state], count)
        by_state: Tally[tuple[str, str, str]] = Tally()
        for replica in list(self._registry.machine.state.replicas.values()):
            if replica.row is None:
                continue
            # The row's own load is as of the last change that routing goes by.
            key, load = replica.key, replica.report.load
            by_state[key.pipeline, key.stage, replica.row.state.name.lower()] += 1
            who = [key.pipeline, key.stage, str(key.replica_id)]
            running.add_metric(who, load.running)
            queued.add_metric(who, load.waiting)
            memory.add_metric(who, load.memory_bytes)
            for source in ("computed", "cached", "received"):
                prompts.add_metric([*who, source], getattr(load, f"prompt_tokens_{source}"))
        for (pipeline, stage, state), count in by_state.items():
            replicas.add_metric([pipeline, stage, state], count)
        return nodes, ages, replicas, running, queued, memory, prompts

"""What a head's registry keeps anyway, read at every scrape: nodes, replicas and their loads."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from stagemesh_head.registry.registry import Registry


class NodeMetrics:
    """Nodes and replicas by state, leases, events."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        """Called by the exporter at every scrape, in a thread of its own."""
        yield from self._nodes()
        yield from self._replicas()
        events = CounterMetricFamily("stagemesh_events", "What happened to nodes and replicas.", labels=["type"])
        for kind, count in list(self._registry.events.counts.items()):
            events.add_metric([kind], count)
        yield events

    def _nodes(self) -> Iterable[Metric]:
        nodes = GaugeMetricFamily("stagemesh_nodes", "Nodes by state.", labels=["state"])
        ages = GaugeMetricFamily("stagemesh_lease_age_seconds", "Since a node's last heartbeat.", labels=["node"])
        states: Tally[str] = Tally()
        now = self._registry.clock()
        for node in list(self._registry.machine.state.nodes.values()):
            states[node.state.name.lower()] += 1
            if node.gone_at is None:
                ages.add_metric([node.node_id], now - node.last_heartbeat)
        for state, count in states.items():
            nodes.add_metric([state], count)
        return nodes, ages

    def _replicas(self) -> Iterable[Metric]:
        replicas = GaugeMetricFamily("stagemesh_replicas", "Replicas by state.", labels=["pipeline", "stage", "state"])
        names = ["pipeline", "stage", "replica"]
        running = GaugeMetricFamily("stagemesh_replica_running_tasks", "Tasks in a replica's engine.", labels=names)
        queued = GaugeMetricFamily("stagemesh_replica_waiting_tasks", "Tasks waiting in a replica.", labels=names)
        memory = GaugeMetricFamily("stagemesh_replica_memory_bytes", "Resident memory of a replica.", labels=names)
        prompts = CounterMetricFamily(
            "stagemesh_replica_prompt_tokens", "Prompt tokens, by where their KV blocks came from.",
            labels=[*names, "source"],
        )  # fmt: skip
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
        return replicas, running, queued, memory, prompts

"""What a gateway's parts keep anyway, read at every scrape: the hot path knows nothing of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from stagemesh.config import Pipeline
from stagemesh_head.gateway import Gateway


class GatewayMetrics:
    """Admission, pools and links."""

    def __init__(self, gateway: Gateway, pipelines: Sequence[Pipeline]) -> None:
        self._gateway, self._pipelines = gateway, pipelines

    def collect(self) -> Iterable[Metric]:
        """Called by the exporter at every scrape, in a thread of its own."""
        yield from self._requests()
        yield from self._stages()
        yield self._links()

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
        labels = ["pipeline", "stage"]
        waiting = GaugeMetricFamily("stagemesh_stage_waiting_tasks", "Tasks that wait for a replica.", labels=labels)
        inflight = GaugeMetricFamily("stagemesh_stage_inflight_tasks", "Tasks that replicas work on.", labels=labels)
        ready = GaugeMetricFamily("stagemesh_stage_ready_replicas", "Replicas READY.", labels=labels)
        picks = CounterMetricFamily("stagemesh_picks", "Replicas chosen, by what.", labels=[*labels, "policy"])
        for pipeline in self._pipelines:
            for pool in self._gateway.pools.of_pipeline(pipeline.name):
                names = [pipeline.name, pool.stage]
                waiting.add_metric(names, pool.waiting)
                inflight.add_metric(names, pool.inflight)
                ready.add_metric(names, pool.ready)
                beside = pool.placed_beside
                picks.add_metric([*names, pipeline.routing.policy], pool.picks - beside)
                if beside:
                    picks.add_metric([*names, "beside-companion"], beside)
        return waiting, inflight, ready, picks

    def _links(self) -> Metric:
        family = CounterMetricFamily(
            "stagemesh_link_reconnects", "Links that opened again.", labels=["pipeline", "stage", "replica"]
        )
        for key, opened in list(self._gateway.links.opened.items()):
            family.add_metric([key.pipeline, key.stage, str(key.replica_id)], opened - 1)
        return family

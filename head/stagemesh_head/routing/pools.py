"""All stage pools of a head."""

from __future__ import annotations

from collections.abc import Iterable

from stagemesh.config import Pipeline
from stagemesh_head.links.link import Link
from stagemesh_head.registry.rows import ReplicaKey, ReplicaRow
from stagemesh_head.routing.pool import StagePool
from stagemesh_head.routing.registry import make_policy


class Pools:
    """One pool for every stage of every pipeline, kept up to date by the link manager."""

    def __init__(self, pipelines: Iterable[Pipeline]) -> None:
        self._pools = {
            (pipeline.name, stage.name): StagePool(
                pipeline.name,
                stage.name,
                make_policy(pipeline.routing.policy),
                max_waiting=pipeline.limits.max_waiting,
            )
            for pipeline in pipelines
            for stage in pipeline.stages
        }

    def replica_changed(self, key: ReplicaKey, row: ReplicaRow | None, link: Link | None) -> None:
        """A row or link changed. Replicas of stages that no pipeline has are ignored."""
        pool = self._pools.get((key.pipeline, key.stage))
        if pool is not None:
            pool.update(key.replica_id, row, link)

    def of(self, pipeline: str, stage: str) -> StagePool:
        """The pool of a stage that there is."""
        return self._pools[pipeline, stage]

    def of_pipeline(self, pipeline: str) -> list[StagePool]:
        """The pools of a pipeline's stages, in their order."""
        return [pool for (name, _), pool in self._pools.items() if name == pipeline]

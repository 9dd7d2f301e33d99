"""What clients are told of the pipelines: their stages, and what keeps one from serving."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf import json_format

from stagemesh.config import Pipeline, Stage
from stagemesh.v1 import pipeline_pb2 as pipeline_pb
from stagemesh.wire import MODALITIES, supported_tasks
from stagemesh_head.registry.words import pipeline_named
from stagemesh_head.routing.pools import Pools

_EDGES = {"whole": pipeline_pb.EDGE_MODE_WHOLE, "stream": pipeline_pb.EDGE_MODE_STREAM}


class Catalogue:
    """The pipelines of a head, as they are now."""

    def __init__(
        self, pipelines: Iterable[Pipeline], pools: Pools, target: Callable[[str, str], int] | None = None
    ) -> None:
        """Args: target: how many replicas a (pipeline, stage) should have; the file's number when None."""
        self._pipelines = {pipeline.name: pipeline for pipeline in sorted(pipelines, key=lambda one: one.name)}
        # A revision is a hash of the whole pipeline: worked out once.
        self._revisions = {name: pipeline.revision for name, pipeline in self._pipelines.items()}
        self._pools = pools
        self._target_of = target

    def names(self) -> list[str]:
        """In order."""
        return list(self._pipelines)

    def describe(self, name: str) -> pipeline_pb.PipelineInfo:
        """One pipeline.

        Raises:
            MeshError: INVALID_REQUEST, no name where there are several; UNKNOWN_PIPELINE.
        """
        pipeline = self._find(name)
        info = pipeline_pb.PipelineInfo(name=pipeline.name, revision=self._revisions[pipeline.name])
        info.stages.extend(self._stage(pipeline, stage) for stage in pipeline.stages)
        return info

    def problems(self, name: str) -> list[str]:
        """What keeps a pipeline from serving, a line a stage."""
        pipeline = self._find(name)
        pools = (self._pools.of(pipeline.name, stage.name) for stage in pipeline.stages)
        return [pool.missing().message for pool in pools if not pool.ready]

    def _find(self, name: str) -> Pipeline:
        return self._pipelines[pipeline_named(name, self._pipelines, "name")]

    def _stage(self, pipeline: Pipeline, stage: Stage) -> pipeline_pb.StageInfo:
        kind = stage.final_output_type or "text"
        info = pipeline_pb.StageInfo(
            stage_id=stage.stage_id,
            name=stage.name,
            stage_type=stage.stage_type,
            engine=stage.engine,
            model=str(stage.model or ""),
            inputs=stage.inputs,
            edge=_EDGES[stage.edge],
            final_output=bool(stage.final_output),
            output_modality=MODALITIES[kind],
            supported_tasks=supported_tasks(kind),
            target_replicas=self._target(pipeline, stage),
            ready_replicas=self._pools.of(pipeline.name, stage.name).ready,
            max_prompt_bytes=stage.limits.max_prompt_bytes,
            media_inputs=[MODALITIES[kind] for kind in stage.media_inputs],
        )
        defaults = {key: value for key, value in dict(stage.default_sampling_params).items() if value is not None}
        json_format.ParseDict(_plain(defaults), info.default_sampling_params)
        return info

    def _target(self, pipeline: Pipeline, stage: Stage) -> int:
        if self._target_of is None:
            return stage.runtime.num_replicas
        return self._target_of(pipeline.name, stage.name)


def _plain(value: Any) -> Any:
    """As JSON has it: string keys, lists."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

"""What a head serves, and the small answers of the inference service, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from google.protobuf import json_format

from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import pipeline_pb2 as pipeline_pb
from stagemesh.wire import enum_word


@dataclass(frozen=True, slots=True)
class StageInfo:
    """One stage of a pipeline."""

    stage_id: int
    name: str
    stage_type: str
    """llm, diffusion or a plug-in's."""
    engine: str
    model: str
    inputs: tuple[str, ...]
    """Names of the stages it reads."""
    edge: str
    """whole or stream: when it starts on the outputs of the stages before it."""
    is_output: bool
    """Its output goes to the client."""
    output_modality: str
    """text, image, audio, video or latent."""
    default_sampling_params: Mapping[str, Any]
    supported_tasks: tuple[str, ...]
    target_replicas: int
    ready_replicas: int
    max_prompt_bytes: int
    media_inputs: tuple[str, ...]
    """Kinds of a request's media that it gets: image, audio, video."""


@dataclass(frozen=True, slots=True)
class PipelineInfo:
    """A pipeline that the head serves."""

    name: str
    revision: str
    """Short hash of the resolved configuration."""
    stages: tuple[StageInfo, ...]
    problems: tuple[str, ...] = ()
    """What keeps it from serving, one line a stage; only from `get_pipeline`."""

    def stage(self, name: str) -> StageInfo | None:
        """The stage of that name."""
        return next((stage for stage in self.stages if stage.name == name), None)

    def stage_type(self, name: str, position: int) -> str | None:
        """Kind of a stage by name, or by position when the name is empty; None when there is no such stage."""
        if name:
            stage = self.stage(name)
            return stage.stage_type if stage else None
        return self.stages[position].stage_type if position < len(self.stages) else None


@dataclass(frozen=True, slots=True)
class AbortResult:
    """What became of a request that was to be aborted."""

    request_id: str
    outcome: str
    """aborted, unconfirmed (some stage had not confirmed in time) or unknown (no such request runs)."""
    unconfirmed_stages: tuple[str, ...] = ()


def pipeline_info(message: pipeline_pb.PipelineInfo, problems: tuple[str, ...] = ()) -> PipelineInfo:
    """The plain form of a pipeline."""
    return PipelineInfo(message.name, message.revision, tuple(_stage_info(stage) for stage in message.stages), problems)


def _stage_info(stage: pipeline_pb.StageInfo) -> StageInfo:
    return StageInfo(
        stage_id=stage.stage_id,
        name=stage.name,
        stage_type=stage.stage_type,
        engine=stage.engine,
        model=stage.model,
        inputs=tuple(stage.inputs),
        edge=enum_word(pipeline_pb.EdgeMode, stage.edge),
        is_output=stage.final_output,
        output_modality=enum_word(frame_pb.Modality, stage.output_modality),
        default_sampling_params=MappingProxyType(json_format.MessageToDict(stage.default_sampling_params)),
        supported_tasks=tuple(stage.supported_tasks),
        target_replicas=stage.target_replicas,
        ready_replicas=stage.ready_replicas,
        max_prompt_bytes=stage.max_prompt_bytes,
        media_inputs=tuple(enum_word(frame_pb.Modality, kind) for kind in stage.media_inputs),
    )


def abort_result(message: inference_pb.AbortResult) -> AbortResult:
    """The plain form of an abort's result."""
    outcome = enum_word(inference_pb.AbortOutcome, message.outcome)
    return AbortResult(message.request_id, outcome, tuple(message.unconfirmed_stages))

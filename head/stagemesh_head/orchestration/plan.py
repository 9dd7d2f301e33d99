"""Which stages a request visits: the pipeline's graph, cut down to what the wanted outputs need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagemesh.config import Pipeline, Stage
from stagemesh.rpc.errors import invalid
from stagemesh.telemetry.context import NO_TRACE, TraceContext
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh.wire import MODALITIES
from stagemesh_head.orchestration import params as stage_params
from stagemesh_head.orchestration.media import check_media
from stagemesh_head.orchestration.pair import prefill_params
from stagemesh_head.orchestration.recovery import ResumeMode, resume_mode


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage as one request uses it."""

    name: str
    stage: Stage
    inputs: tuple[str, ...]
    consumers: tuple[str, ...]
    """Stages of this request that read it."""
    is_output: bool
    """Its frames go to the client."""
    params: sampling_pb.SamplingParams
    resume: ResumeMode
    reads_stream: bool
    """It starts at its inputs' first chunk."""


@dataclass(frozen=True, slots=True)
class Companion:
    """A further visit to the first stage, for the stages that read the request's own: classifier-free guidance."""

    suffix: str
    """Its id is its request's id and this."""
    role: str
    """What the adapters of the consumers know it by."""
    prompt: prompt_pb.Prompt
    params: sampling_pb.SamplingParams


@dataclass(frozen=True, slots=True)
class Plan:
    """A valid request, ready to run."""

    request_id: str
    pipeline: Pipeline
    request: inference_pb.GenerateRequest
    stages: tuple[PlannedStage, ...]
    """In an order in which every stage comes after its inputs."""
    is_delta: bool
    """Growing outputs are delivered as they grow."""
    trace: TraceContext = NO_TRACE
    is_interactive: bool = False
    """The first stage's prompt goes on while it runs."""
    companion_readers: tuple[str, ...] = ()
    """Stages that wait for companions of the first one; empty when none are to be made."""


class Planner:
    """Makes plans for one pipeline. What does not depend on the request is worked out once."""

    def __init__(self, pipeline: Pipeline) -> None:
        """Raises ValueError when a stage's default sampling parameters are wrong."""
        self.pipeline = pipeline
        self._order = pipeline.in_order()
        self._outputs = tuple(stage for stage in pipeline.stages if stage.final_output)
        self._defaults = {stage.name: stage_params.defaults_of(stage) for stage in pipeline.stages}

    def plan(
        self, request: inference_pb.GenerateRequest, trace: TraceContext = NO_TRACE, *, is_interactive: bool = False
    ) -> Plan:
        """The plan of a request whose envelope is valid.

        Raises:
            MeshError: INVALID_REQUEST that names the field.
        """
        outputs = self.wanted_outputs(request.output_stages, request.output_modalities)
        needed = self._needed(outputs)
        given = stage_params.match(self.pipeline, request.sampling)
        merged = {
            stage.name: stage_params.merge(stage, self._defaults[stage.name], given.get(stage.name))
            for stage in self._order
            # Parameters of skipped stages are checked too: a mistake is a mistake.
            if stage.name in needed or stage.name in given
        }
        stages = []
        for stage in self._order:
            if stage.name not in needed:
                continue
            consumers = tuple(
                other.name for other in self._order if other.name in needed and stage.name in other.inputs
            )
            params = merged[stage.name]
            if stage.is_prefill_only:
                params = prefill_params(merged[consumers[0]])
            stage_params.fix_seed(params)
            # Which tokens belong to which chunk of an interactive prompt is known to the engine alone; and a prefill
            # stage's token is nothing without the KV blocks.
            restarts = is_interactive or stage.is_prefill_only
            resume = ResumeMode.RESTARTED if restarts else resume_mode(params)
            stages.append(
                PlannedStage(
                    name=stage.name,
                    stage=stage,
                    inputs=stage.inputs,
                    consumers=consumers,
                    is_output=stage.name in outputs,
                    params=params,
                    resume=resume,
                    reads_stream=stage.edge == "stream" and bool(stage.inputs),
                )
            )
        check_media(request.prompt, [planned.stage for planned in stages])
        first, readers = stages[0], tuple[str, ...]()
        if first.stage.prompt_expand is not None:
            readers = tuple(one.name for one in stages if first.name in one.inputs and not one.reads_stream)
        if is_interactive:
            check_interactive(request, first.name, first.params)
            if first.stage.is_prefill_only:
                raise invalid("pipeline", self.pipeline.name, "its prefill/decode pair takes a prompt whole")
            if readers:
                problem = f"is interactive: stage {first.name!r} makes companions of whole prompts only"
                raise invalid("request_id", request.request_id, problem)
        return Plan(
            request_id=request.request_id,
            pipeline=self.pipeline,
            request=request,
            stages=tuple(stages),
            is_delta=request.output_mode != inference_pb.OUTPUT_MODE_FINAL_ONLY,
            trace=trace,
            is_interactive=is_interactive,
            companion_readers=readers,
        )

    def chunk_params(self, plan: Plan, params: sampling_pb.SamplingParams) -> sampling_pb.SamplingParams:
        """A chunk's own parameters over those of its request.

        Raises:
            MeshError: INVALID_REQUEST that names the field.
        """
        first = plan.stages[0]
        merged = stage_params.merge(first.stage, first.params, ("params", params))
        check_interactive(plan.request, first.name, merged)
        return merged

    def wanted_outputs(self, names: Sequence[str], modalities: Sequence[frame_pb.Modality.ValueType]) -> frozenset[str]:
        """Names of the output stages that a request wants: by name, else by modality, else all."""
        available = {stage.name: stage for stage in self._outputs}
        if names:
            for position, name in enumerate(names):
                if name not in available:
                    raise invalid(
                        f"output_stages[{position}]",
                        name,
                        f"is not an output stage of {self.pipeline.name!r}; those are {', '.join(available)}",
                    )
            return frozenset(names)
        if not modalities:
            return frozenset(available)
        wanted: set[str] = set()
        for position, modality in enumerate(modalities):
            found = {s.name for s in self._outputs if MODALITIES[s.final_output_type or "text"] == modality}
            if not found:
                offered = sorted({s.final_output_type or "text" for s in self._outputs})
                given = frame_pb.Modality.Name(modality) if modality in frame_pb.Modality.values() else modality
                raise invalid(
                    f"output_modalities[{position}]",
                    given,
                    f"pipeline {self.pipeline.name!r} delivers {', '.join(offered)}",
                )
            wanted |= found
        return frozenset(wanted)

    def _needed(self, outputs: frozenset[str]) -> set[str]:
        """The outputs and everything before them."""
        needed = set(outputs)
        for stage in reversed(self._order):
            if stage.name in needed:
                needed.update(stage.inputs)
        return needed


def check_interactive(request: inference_pb.GenerateRequest, stage: str, params: sampling_pb.SamplingParams) -> None:
    """Refuse what an engine cannot do while its prompt goes on.

    Raises:
        MeshError: INVALID_REQUEST that names the field.
    """
    if request.output_mode == inference_pb.OUTPUT_MODE_FINAL_ONLY:
        raise invalid("output_mode", "FINAL_ONLY", "an interactive request delivers as it goes: use DELTA")
    if params.llm.n > 1:
        raise invalid(f"sampling[{stage}].n", params.llm.n, "an interactive request has one completion")
    if params.llm.stop:
        raise invalid(f"sampling[{stage}].stop", list(params.llm.stop), "an interactive request takes no stop texts")

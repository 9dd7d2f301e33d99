"""A resolved pipeline: frozen, validated, JSON round-trip.

These models are what the head serves and what travels to the workers. How files become one is `load.py`.
"""

from __future__ import annotations

import graphlib
import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from stagemesh.config.errors import suggest
from stagemesh.names import LABEL, LABEL_WORDS

ENGINE_BY_TYPE = {"llm": "vllm", "diffusion": "diffusion"}
OUTPUT_BY_TYPE = {"llm": "text", "diffusion": "image"}
OutputType = Literal["text", "image", "audio", "video", "latent"]
MediaKind = Literal["image", "audio", "video"]
EdgeMode = Literal["whole", "stream"]


class _Frozen(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, protected_namespaces=()
    )


class Runtime(_Frozen):
    """Where and how often a stage runs."""

    devices: str | tuple[int, ...] | None = None
    """Device numbers on a node: "0,1", a list, "auto" or unset; see [Devices](#devices) for how a list is shared."""
    num_replicas: Annotated[int, Field(ge=0)] = 1
    """Replicas wanted; 0 for a stage that other nodes will fill."""
    process: bool = True
    """Kept for files of other systems: a replica is always a process of its own."""
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Most requests in one engine batch; unset leaves it to the engine."""
    shared_devices: bool = False
    """Replicas may lie on devices of other stages' replicas; never on each other's."""
    stage_init_timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds a replica may take to become READY."""
    stuck_after: Annotated[float, Field(gt=0)] = 60.0
    """Seconds without an engine step, while there is work, after which a replica counts as stuck."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the replica process."""

    @field_validator("devices", mode="before")
    @classmethod
    def _device_list(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, list | tuple):
            texts = [str(item).strip() for item in value if not isinstance(item, bool)]
            if len(texts) == len(value) and all(text.isascii() and text.isdecimal() for text in texts):
                return tuple(int(text) for text in texts)
        elif value is None or isinstance(value, str):
            return value
        raise ValueError('want device numbers such as "0,1", a list of them, or auto')

    @field_validator("env", mode="before")
    @classmethod
    def _texts(cls, value: object) -> object:
        """Numbers are written without quotes by everybody: OMP_NUM_THREADS: 4."""
        if not isinstance(value, dict):
            return value
        is_number = {name: isinstance(item, int | float) and not isinstance(item, bool) for name, item in value.items()}
        return {name: str(item) if is_number[name] else item for name, item in value.items()}


class StageLimits(_Frozen):
    """Bounds of one stage."""

    max_prompt_bytes: Annotated[int, Field(ge=1)] = 1 << 20
    """Largest prompt that the stage takes, in bytes."""
    companion_timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that the stage's finished output waits for its companions."""


class Routing(_Frozen):
    """How tasks are spread over a stage's replicas."""

    policy: str = "least-queue-length"
    """random, round-robin, least-queue-length, power-of-two, prefix-affinity or a plug-in's."""


class Limits(_Frozen):
    """Bounds of the whole pipeline."""

    max_inflight: Annotated[int, Field(ge=1)] = 1024
    """Requests that run at once."""
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    """Requests that wait for their turn at once, and tasks that wait for a replica, per stage."""
    max_per_client: Annotated[int, Field(ge=1)] | None = None
    """Requests of one client, told by its token, that run and wait at once; null: no bound of its own."""
    request_timeout: Annotated[float, Field(gt=0)] | None = 600.0
    """Seconds a request may take when its client set no deadline; null: for ever."""
    tensor_threshold_bytes: Annotated[int, Field(ge=0)] = 64 << 10
    """Outputs from this size stay with their producer and travel by reference."""


class Stage(_Frozen):
    """One model of a pipeline."""

    stage_id: Annotated[int, Field(ge=0)] = 0
    """Position in the file, from 0."""
    name: str
    """RFC-1123 label, unique in the pipeline."""
    stage_type: str = "llm"
    """llm, diffusion, or a plug-in's."""
    engine: str = ""
    """Engine class: vllm, diffusion, synthetic, a plug-in's, or your own by path; by `stage_type` when unset."""
    model: str = ""
    """Folder or name of the model; relative paths are relative to the pipeline file."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine, checked by the worker against the engine's real fields."""
    runtime: Runtime = Runtime()
    """Where and how often it runs."""
    inputs: tuple[str, ...] = ()
    """Names of the stages that it reads. In a file: names or ids, the stage before when unset."""
    input_adapter: str | None = None
    """How it reads them: a built-in adapter or the path of your own; by type when unset."""
    adapter_args: dict[str, Any] = Field(default_factory=dict)
    """Options of the adapter, such as `template`."""
    media_inputs: tuple[MediaKind, ...] = ("image", "audio", "video")
    """Kinds of a request's media that it gets. In a file: none for a stage that reads others, when unset."""
    final_output: bool = False
    """Its output goes to the client. In a file: true for stages that nobody reads."""
    final_output_type: OutputType = "text"
    """Kind of its output; by `stage_type` when unset."""
    default_sampling_params: dict[str, Any] = Field(default_factory=dict)
    """For fields that a request leaves unset."""
    is_comprehension: bool = False
    """Kept for files of other systems: every stage reads the prompt as its engine does."""
    is_prefill_only: bool = False
    """The prefill half of a prefill/decode pair."""
    is_decode_only: bool = False
    """The decode half of a prefill/decode pair."""
    connector: str | None = None
    """KV connector of a prefill/decode pair."""
    prompt_expand: str | None = None
    """Path of a function that makes companions of a prompt; on the first stage only."""
    edge: EdgeMode = "whole"
    """Start when the inputs are complete, or at their first chunk."""
    lora_modules: dict[str, str] = Field(default_factory=dict)
    """Adapters that requests may ask for: name to path."""
    control_methods: tuple[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")], ...] = ()
    """Methods of its engine that operators may call beyond the usual ones; with vLLM, of a `worker_extension_cls`."""
    limits: StageLimits = StageLimits()
    """Bounds of its requests."""

    @model_validator(mode="before")
    @classmethod
    def _fill_by_type(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kind = values.get("stage_type", "llm")
        filled = dict(values)
        if not filled.get("engine") and isinstance(kind, str) and kind in ENGINE_BY_TYPE:
            filled["engine"] = ENGINE_BY_TYPE[kind]
        if filled.get("final_output_type") is None:
            filled["final_output_type"] = OUTPUT_BY_TYPE.get(kind, "text") if isinstance(kind, str) else "text"
        return filled

    @field_validator("name")
    @classmethod
    def _label(cls, name: str) -> str:
        return check_label(name)

    @field_validator("engine")
    @classmethod
    def _has_engine(cls, engine: str) -> str:
        if not engine:
            raise ValueError(f"a stage_type other than {', '.join(ENGINE_BY_TYPE)} must name its engine")
        return engine


class Pipeline(_Frozen):
    """A graph of stages."""

    name: str
    """RFC-1123 label; the file's name when unset."""
    stages: tuple[Stage, ...]
    """The models, in the order of their ids."""
    routing: Routing = Routing()
    """How tasks are spread over replicas."""
    limits: Limits = Limits()
    """Bounds of the whole pipeline."""

    @field_validator("name")
    @classmethod
    def _label(cls, name: str) -> str:
        return check_label(name)

    @field_validator("stages")
    @classmethod
    def _some(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        if not stages:
            raise ValueError("a pipeline needs at least one stage")
        return stages

    @property
    def revision(self) -> str:
        """Short hash of everything in it: equal pipelines have equal revisions."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def stage(self, name_or_id: str | int) -> Stage:
        """A stage by its name or id. Raises KeyError with a did-you-mean."""
        for stage in self.stages:
            if name_or_id in (stage.name, stage.stage_id) or str(name_or_id) == str(stage.stage_id):
                return stage
        names = [stage.name for stage in self.stages]
        hint = suggest(str(name_or_id), names) or f"stages are {', '.join(names)}"
        raise KeyError(f"pipeline {self.name!r} has no stage {name_or_id!r}; {hint}")

    def outputs(self) -> tuple[Stage, ...]:
        """The stages whose output goes to the client."""
        return tuple(stage for stage in self.stages if stage.final_output)

    def consumers(self, stage: Stage) -> tuple[Stage, ...]:
        """The stages that read `stage`."""
        return tuple(other for other in self.stages if stage.name in other.inputs)

    def in_order(self) -> tuple[Stage, ...]:
        """The stages, each after its inputs; among equals by stage id. Raises graphlib.CycleError."""
        sorter = graphlib.TopologicalSorter({stage.name: stage.inputs for stage in self.stages})
        sorter.prepare()
        ready, order = list[Stage](), list[Stage]()
        while sorter:
            ready += [self.stage(name) for name in sorter.get_ready()]
            ready.sort(key=lambda stage: stage.stage_id)
            order.append(ready.pop(0))
            sorter.done(order[-1].name)
        return tuple(order)


def check_label(name: str) -> str:
    """An RFC-1123 label, as names of pipelines and stages are. Raises ValueError."""
    if not LABEL.fullmatch(name):
        raise ValueError(f"must be {LABEL_WORDS}")
    return name

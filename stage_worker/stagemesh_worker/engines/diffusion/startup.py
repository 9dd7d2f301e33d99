"""Checks of a stage's configuration: before the start without the pipeline, and once it is loaded with it."""

from __future__ import annotations

from google.protobuf import json_format

from stagemesh.config import Stage, suggest
from stagemesh.rpc.errors import MeshError
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh_worker.engines.base import EngineConfigError, EngineInput
from stagemesh_worker.engines.diffusion.facts import PipelineFacts
from stagemesh_worker.engines.diffusion.options import DiffusionOptions
from stagemesh_worker.engines.diffusion.request import RESERVED, build_request


def parse_stage(stage: Stage) -> DiffusionOptions:
    """The stage's `engine_args`.

    Raises:
        EngineConfigError: as `DiffusionOptions.parse`; or a default parameter that no diffusion stage has.
    """
    args = dict(stage.engine_args)
    if stage.runtime.max_batch_size is not None:
        args.setdefault("max_num_seqs", stage.runtime.max_batch_size)
    options = DiffusionOptions.parse(args, "engine_args")
    _default_params(stage)
    return options


def check_defaults(stage: Stage, facts: PipelineFacts, options: DiffusionOptions) -> None:
    """Check what every request of this stage would meet: the default parameters and `diffusers_call_kwargs`.

    Raises:
        EngineConfigError: the loaded pipeline does not take one of them.
    """
    for name, value in options.diffusers_call_kwargs.items():
        where = f"engine_args.diffusers_call_kwargs.{name}: {value!r}"
        if name in RESERVED:
            raise EngineConfigError(f"{where}: the engine sets this argument itself")
        if name not in facts.arguments:
            allowed = sorted(set(facts.arguments) - RESERVED)
            hint = suggest(name, allowed) or f"it takes {', '.join(allowed)}"
            raise EngineConfigError(f"{where}: {facts.class_name} takes no such argument; {hint}")
    try:
        build_request(EngineInput(text="a check"), _default_params(stage), facts, options)
    except MeshError as error:
        raise EngineConfigError(f"default_sampling_params.{error.message}") from error


def _default_params(stage: Stage) -> sampling_pb.DiffusionSamplingParams:
    path = "default_sampling_params"
    given = dict(stage.default_sampling_params or {})
    known = sampling_pb.DiffusionSamplingParams.DESCRIPTOR.fields_by_name
    # A name that is no typed field is an argument of the pipeline's call, as in `extra`.
    extra = {**given.pop("extra", {}), **{name: given.pop(name) for name in list(given) if name not in known}}
    params = sampling_pb.DiffusionSamplingParams()
    for name, value in given.items():
        try:
            json_format.ParseDict({name: value}, params)
        except json_format.ParseError as error:
            raise EngineConfigError(f"{path}.{name}: {value!r}: {error}") from error
    params.extra.update(extra)
    return params

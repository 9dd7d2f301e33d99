"""Validate: types and names by the models, then what only the whole graph can tell."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from stagemesh.config.errors import ConfigError, suggest
from stagemesh.config.layout import devices_per_replica, split_devices
from stagemesh.config.model import Limits, Pipeline, Routing, Runtime, Stage, StageLimits
from stagemesh.config.origins import Origins, Path, Tree, show_path
from stagemesh.v1 import sampling_pb2 as sampling_pb

BUILT_IN_ADAPTERS = ("prompt", "text", "chat", "tokens", "embeds", "diffusion")
"""Names that `input_adapter` takes beside dotted paths; a test holds them against the worker's."""
_MODELS: dict[str, type[BaseModel]] = {
    "runtime": Runtime, "limits": StageLimits, "": Stage,
}  # fmt: skip
_TOP_MODELS: dict[str, type[BaseModel]] = {"routing": Routing, "limits": Limits, "": Pipeline}


def validate(tree: Tree, source: str) -> Pipeline:
    """The frozen pipeline of a resolved tree. Raises ConfigError."""
    try:
        pipeline = Pipeline.model_validate(tree.data)
    except ValidationError as error:
        raise _first_problem(error, tree, source) from None
    try:
        check_graph(pipeline)
        for stage in pipeline.stages:
            check_stage(stage)
    except ConfigError as error:
        raise error.at(_where(tree.origins, error, source)) from None
    return pipeline


def check_graph(pipeline: Pipeline) -> None:
    """Ids, names, inputs, cycles, prefill/decode pairs. Raises ConfigError."""
    seen: dict[str, int] = {}
    ids = [stage.stage_id for stage in pipeline.stages]
    for index, stage in enumerate(pipeline.stages):
        path = f"stages[{index}]"
        if stage.stage_id != index:
            twice = ids.count(stage.stage_id) > 1
            problem = "two stages have this id" if twice else "ids count from 0 without a gap, in the order of the file"
            hint = f"want {index}, or leave stage_id out"
            raise ConfigError(problem, path=f"{path}.stage_id", value=stage.stage_id, hint=hint)
        if stage.name in seen:
            raise ConfigError(f"stage {seen[stage.name]} has this name too", path=f"{path}.name", value=stage.name)
        seen[stage.name] = index
    for index, stage in enumerate(pipeline.stages):
        for number, name in enumerate(stage.inputs):
            path = f"stages[{index}].inputs[{number}]"
            if name not in seen:
                hint = suggest(name, seen) or f"stages are {', '.join(seen)}"
                raise ConfigError("the pipeline has no such stage", path=path, value=name, hint=hint)
            if name == stage.name:
                raise ConfigError("a stage cannot read itself", path=path, value=name)
        if len(set(stage.inputs)) != len(stage.inputs):
            raise ConfigError("an input is listed twice", path=f"stages[{index}].inputs", value=list(stage.inputs))
    _check_cycles(pipeline)
    if not pipeline.outputs():
        raise ConfigError("no stage delivers its output", path="stages", hint="set final_output: true on one")
    if all(stage.inputs for stage in pipeline.stages):
        raise ConfigError("no stage reads the prompt", path="stages", hint="one needs `inputs: []`")
    _check_pairs(pipeline)


def _check_cycles(pipeline: Pipeline) -> None:
    inputs = {stage.name: stage.inputs for stage in pipeline.stages}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        if name in way:
            circle = " reads ".join((*way[way.index(name) :], name))
            index = next(i for i, stage in enumerate(pipeline.stages) if stage.name == name)
            raise ConfigError(f"the stages form a cycle: {circle}", path=f"stages[{index}].inputs")
        if name not in done:
            for upstream in inputs[name]:
                visit(upstream, (*way, name))
            done.add(name)

    for name in inputs:
        visit(name, ())


def _check_pairs(pipeline: Pipeline) -> None:
    prefills = [stage for stage in pipeline.stages if stage.is_prefill_only]
    decodes = [stage for stage in pipeline.stages if stage.is_decode_only]
    if len(prefills) > 1:
        names = " and ".join(stage.name for stage in prefills)
        raise ConfigError(f"{names} are both is_prefill_only: a pipeline has one prefill/decode pair", path="stages")
    if len(decodes) > 1 or len(prefills) != len(decodes):
        missing = "is_decode_only" if len(prefills) > len(decodes) else "is_prefill_only"
        raise ConfigError(f"a prefill/decode pair needs exactly one stage with {missing}", path="stages")
    if not prefills:
        return
    prefill, decode = prefills[0], decodes[0]
    path = f"stages[{decode.stage_id}]"
    if decode.inputs != (prefill.name,):
        raise ConfigError(
            "the decode stage reads the prefill stage only", path=f"{path}.inputs", value=list(decode.inputs),
            hint=f"inputs: [{prefill.name}]",
        )  # fmt: skip
    if prefill.model != decode.model:
        raise ConfigError("both halves of the pair need one model", path=f"{path}.model", value=decode.model)
    roles = [(stage.engine_args.get("kv_transfer_config") or {}).get("kv_role") for stage in (prefill, decode)]
    for stage, role, right in zip((prefill, decode), roles, ("kv_producer", "kv_consumer"), strict=True):
        if role not in (None, right, "kv_both"):
            raise ConfigError(
                f"want {right}", path=f"stages[{stage.stage_id}].engine_args.kv_transfer_config.kv_role", value=role
            )
    connectors = [
        stage.connector or (stage.engine_args.get("kv_transfer_config") or {}).get("kv_connector")
        for stage in (prefill, decode)
    ]
    if connectors[0] != connectors[1]:
        raise ConfigError("both halves need the same connector", path=f"{path}.connector", value=connectors[1],
                          hint=f"{prefill.name} has {connectors[0]}")  # fmt: skip
    parallel = [stage.engine_args.get("tensor_parallel_size", 1) for stage in (prefill, decode)]
    if parallel[0] != parallel[1]:
        raise ConfigError("both halves need the same tensor parallelism",
                          path=f"{path}.engine_args.tensor_parallel_size", value=parallel[1])  # fmt: skip


def check_stage(stage: Stage) -> None:
    """What one stage's fields say together. Raises ConfigError."""
    path = f"stages[{stage.stage_id}]"
    split_devices(
        stage.runtime.devices, stage.runtime.num_replicas, devices_per_replica(stage), path=f"{path}.runtime.devices"
    )
    check_sampling(stage, f"{path}.default_sampling_params")
    if stage.input_adapter is not None and stage.input_adapter not in BUILT_IN_ADAPTERS:
        check_dotted(stage.input_adapter, f"{path}.input_adapter", BUILT_IN_ADAPTERS)
    if stage.prompt_expand is not None:
        check_dotted(stage.prompt_expand, f"{path}.prompt_expand")
    if stage.edge == "stream" and not stage.inputs:
        raise ConfigError("a stage that reads no other has no edge", path=f"{path}.edge", value="stream")


def check_sampling(stage: Stage, path: str) -> None:
    """`default_sampling_params` has only fields of the stage's kind. Raises ConfigError with a did-you-mean."""
    message = sampling_pb.DiffusionSamplingParams if stage.stage_type == "diffusion" else sampling_pb.LlmSamplingParams
    known = list(message.DESCRIPTOR.fields_by_name)
    for name in stage.default_sampling_params:
        if name not in known:
            hint = suggest(name, known) or "what only the engine knows goes into `extra`"
            raise ConfigError("unknown sampling parameter", path=f"{path}.{name}", hint=hint)


def check_dotted(dotted: str, path: str, names: tuple[str, ...] = ()) -> None:
    """A dotted path leads to something in a module that is there. Nothing of it is executed. Raises ConfigError."""
    module, _, attribute = dotted.replace(":", ".").rpartition(".")
    hint = suggest(dotted, names) or (f"built-in ones are {', '.join(names)}" if names else "")
    if not module or not attribute.isidentifier():
        raise ConfigError("want `package.module.function`", path=path, value=dotted, hint=hint)
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        found = None
    if found is None:
        raise ConfigError(f"there is no module {module!r} here", path=path, value=dotted, hint=hint)
    if found.origin is None or not found.origin.endswith(".py"):
        return
    with open(found.origin, encoding="utf-8") as file:
        body = ast.parse(file.read()).body
    if attribute not in _names(body):
        raise ConfigError(f"module {module!r} has no {attribute!r}", path=path, value=dotted,
                          hint=suggest(attribute, _names(body)))  # fmt: skip


def _names(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    return names


def _first_problem(error: ValidationError, tree: Tree, source: str) -> ConfigError:
    problems = error.errors(include_url=False)
    # A misspelt key explains the missing one beside it.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path: Path = tuple(problem["loc"])
    where = str(tree.origins[path]) if tree.origins[path].source != "default" else source
    if problem["type"] == "extra_forbidden":
        return ConfigError("unknown key", file=where, path=show_path(path), hint=_hint_for(path))
    if problem["type"] == "missing":
        return ConfigError("is missing", file=where, path=show_path(path))
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if problem["msg"].startswith("Input should be "):
        message = f"want {message}"
    return ConfigError(message, file=where, path=show_path(path), value=problem["input"])


def _hint_for(path: Path) -> str:
    key = str(path[-1])
    if len(path) >= 3 and path[0] == "stages":
        model = _MODELS.get(str(path[2]) if len(path) > 3 else "", Stage)
        near = suggest(key, model.model_fields)
        return near or ("options of the engine go into engine_args" if model is Stage else "")
    return suggest(key, _TOP_MODELS.get(str(path[0]) if len(path) > 1 else "", Pipeline).model_fields)


def _where(origins: Origins, error: ConfigError, source: str) -> str:
    """The file and line of the value an error is about, as well as its path tells."""
    parts: list[Any] = []
    for piece in error.path.replace("]", "").replace("[", ".").split("."):
        parts.append(int(piece) if piece.isdigit() else piece)
    origin = origins[tuple(parts)]
    return source if origin.source == "default" else str(origin)


def known_fields() -> Mapping[str, type[BaseModel]]:
    """The models by where they stand in a file, for the reference."""
    return {"": Pipeline, "routing": Routing, "limits": Limits, "stages[]": Stage, "stages[].runtime": Runtime,
            "stages[].limits": StageLimits}  # fmt: skip

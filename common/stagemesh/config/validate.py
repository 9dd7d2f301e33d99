"""Validate: types and names by the models, then what the fields of a stage and the whole graph say together."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from stagemesh.config.dotted import NotHere, check_dotted, code_file
from stagemesh.config.errors import ConfigError, suggest
from stagemesh.config.graph import check_graph
from stagemesh.config.layout import devices_per_replica, parse_devices, split_devices
from stagemesh.config.model import ENGINE_BY_TYPE, Limits, Pipeline, Routing, Runtime, Stage, StageLimits
from stagemesh.config.origins import Origins, Path, Tree, show_path
from stagemesh.config.sampling import check_sampling

BUILT_IN_ADAPTERS = ("prompt", "text", "chat", "tokens", "embeds", "diffusion")
"""Names that `input_adapter` takes beside dotted paths; a test holds them against the worker's."""
_STAGE_MODELS: dict[str, type[BaseModel]] = {"runtime": Runtime, "limits": StageLimits}
_TOP_MODELS: dict[str, type[BaseModel]] = {"routing": Routing, "limits": Limits}


def validate(tree: Tree, source: str, warnings: list[str], *, is_foreign: bool = False) -> Pipeline:
    """The frozen pipeline of a resolved tree.

    Args:
        is_foreign: the file has the `stage_args` form, whose functions and model may be known elsewhere only: that
            is worth a warning, not an error.

    Raises:
        ConfigError: for the first thing that is wrong.
    """
    try:
        pipeline = Pipeline.model_validate(tree.data)
    except ValidationError as error:
        raise _first_problem(error, tree, source) from None
    try:
        check_graph(pipeline)
        for stage in pipeline.stages:
            for problem in _check_stage(stage):
                if not is_foreign:
                    raise problem
                warnings.append(str(problem.at(_where(tree.origins, problem.path, source))))
    except ConfigError as error:
        raise error.at(_where(tree.origins, error.path, source)) from None
    return pipeline


def _check_stage(stage: Stage) -> list[ConfigError]:
    """What one stage's fields say together.

    Returns:
        What may be right on another machine, or with a model from the command line.

    Raises:
        ConfigError: what is wrong in any case.
    """
    path = f"stages[{stage.stage_id}]"
    devices, replicas = f"{path}.runtime.devices", stage.runtime.num_replicas
    parse_devices(stage.runtime.devices, path=devices)
    needed = devices_per_replica(stage)
    if replicas:  # a stage for other nodes may say what its devices would be
        split_devices(stage.runtime.devices, replicas, needed, path=devices)
    check_sampling(stage, f"{path}.default_sampling_params")
    if stage.edge == "stream" and not stage.inputs:
        hint = "leave it out, or give the stage inputs"
        raise ConfigError("a stage that reads no other has no edge", path=f"{path}.edge", value="stream", hint=hint)
    if stage.edge == "stream" and stage.stage_type == "diffusion":
        problem = "a diffusion stage needs the whole output of the stages before"
        raise ConfigError(problem, path=f"{path}.edge", value="stream", hint="want whole")
    problems: list[ConfigError] = []
    for field, names in (("engine", ()), ("input_adapter", BUILT_IN_ADAPTERS), ("prompt_expand", ())):
        dotted = getattr(stage, field)
        if field == "engine" and code_file(dotted) is None:
            continue  # a name, or a path that only the workers' packages can tell
        if dotted is not None and dotted not in names:
            try:
                check_dotted(dotted, f"{path}.{field}", names)
            except NotHere as error:
                problems.append(error)
    if not stage.model and stage.engine in ENGINE_BY_TYPE.values():
        problems.append(ConfigError("is missing", path=f"{path}.model", hint="want a folder or the name of a model"))
    return problems


def _first_problem(error: ValidationError, tree: Tree, source: str) -> ConfigError:
    problems = error.errors(include_url=False)
    # A misspelt key explains the missing one beside it.
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    path = _written_path(problem["loc"], tree.data)
    where, shown = _where(tree.origins, show_path(path), source), show_path(path)
    if problem["type"] == "extra_forbidden":
        return ConfigError("unknown key", file=where, path=shown, hint=_hint_for(path))
    if problem["type"] == "missing":
        return ConfigError("is missing", file=where, path=shown)
    message, hint = _message(problem)
    return ConfigError(message, file=where, path=shown, value=problem["input"], hint=hint)


def _message(problem: Any) -> tuple[str, str]:
    """What is wanted, in our words, and a hint."""
    context = problem.get("ctx") or {}
    match problem["type"]:
        case "greater_than_equal":
            return f"want {context['ge']} or more", ""
        case "greater_than":
            return f"want more than {context['gt']}", ""
        case "literal_error":
            words = context["expected"].replace("'", "").replace(" or ", ", ")
            return f"want one of {words}", suggest(str(problem["input"]), words.split(", "))
        case "value_error":
            message, _, hint = problem["msg"].removeprefix("Value error, ").partition("; ")
            return message, hint
    return problem["msg"].replace("Input should be a valid ", "want a ").replace("Input should be ", "want "), ""


def _written_path(loc: tuple[int | str, ...], data: Any) -> Path:
    """The part of pydantic's location that is in the file: it also names the members of unions."""
    path: list[int | str] = []
    for part in loc:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            break
        path.append(part)
    return tuple(path)


def _hint_for(path: Path) -> str:
    """Where an unknown key may belong, or which key it may be."""
    key = str(path[-1])
    if path[0] != "stages" or len(path) < 3:
        model = _TOP_MODELS.get(str(path[0]), Pipeline) if len(path) > 1 else Pipeline
        return suggest(key, model.model_fields)
    model = _STAGE_MODELS.get(str(path[2]), Stage) if len(path) > 3 else Stage
    if near := suggest(key, model.model_fields, cutoff=0.75):
        return near
    if model is Stage and key in Runtime.model_fields:
        return "it goes into `runtime`"
    if model is not Stage and key in Stage.model_fields:
        return "it goes into the stage itself"
    return suggest(key, model.model_fields) or ("options of the engine go into `engine_args`" if model is Stage else "")


def _where(origins: Origins, path: str, source: str) -> str:
    """File and line of the value that an error is about."""
    parts = tuple(int(p) if p.isdecimal() else p for p in path.replace("]", "").replace("[", ".").split(".") if p)
    origin = origins[parts]
    return source if origin.source == "default" else str(origin)

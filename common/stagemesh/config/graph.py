"""What only the whole graph of stages can tell: ids, names, inputs, cycles, outputs, prefill/decode pairs."""

from __future__ import annotations

import graphlib
from typing import Any

from stagemesh.config.errors import ConfigError, suggest
from stagemesh.config.model import Pipeline, Stage

_ALIKE: dict[str, Any] = {
    "model": "", "input_adapter": None, "adapter_args": {}, "tensor_parallel_size": 1, "dtype": None,
    "kv_cache_dtype": None,
}  # fmt: skip
"""What both halves of a prefill/decode pair must have in common, with the defaults of those in `engine_args`."""


def check_graph(pipeline: Pipeline) -> None:
    """Raises ConfigError for the first thing that is wrong."""
    _check_ids(pipeline)
    names = [stage.name for stage in pipeline.stages]
    for index, stage in enumerate(pipeline.stages):
        for number, name in enumerate(stage.inputs):
            path = f"stages[{index}].inputs[{number}]"
            if name not in names:
                hint = suggest(name, names) or f"stages are {', '.join(names)}"
                raise ConfigError("the pipeline has no such stage", path=path, value=name, hint=hint)
            if name == stage.name:
                raise ConfigError("a stage cannot read itself", path=path, value=name)
        if len(set(stage.inputs)) != len(stage.inputs):
            raise ConfigError("an input is listed twice", path=f"stages[{index}].inputs", value=list(stage.inputs))
    _check_cycles(pipeline)
    _check_outputs(pipeline)
    _check_pair(pipeline)
    _check_companions(pipeline)


def _check_ids(pipeline: Pipeline) -> None:
    ids = [stage.stage_id for stage in pipeline.stages]
    names: dict[str, int] = {}
    for index, stage in enumerate(pipeline.stages):
        path = f"stages[{index}]"
        if stage.stage_id != index:
            if stage.stage_id in ids[:index]:
                problem = "two stages have this id"
            elif sorted(ids) == list(range(len(ids))):
                problem = "stages stand in the order of their ids"
            else:
                problem = "ids count from 0 without a gap"
            hint = f"want {index}, or leave stage_id out"
            raise ConfigError(problem, path=f"{path}.stage_id", value=stage.stage_id, hint=hint)
        if stage.name in names:
            raise ConfigError(f"stage {names[stage.name]} has this name too", path=f"{path}.name", value=stage.name)
        if stage.name.isdecimal():
            problem, hint = "a name of digits only looks like an id", f"want a name such as stage-{stage.name}"
            raise ConfigError(problem, path=f"{path}.name", value=stage.name, hint=hint)
        names[stage.name] = index


def _check_cycles(pipeline: Pipeline) -> None:
    try:
        pipeline.in_order()
    except graphlib.CycleError as error:
        circle = list(reversed(error.args[1]))
        ids = {stage.name: stage.stage_id for stage in pipeline.stages}
        # Begin where the file begins, so that the same file always gets the same answer.
        start = min(range(len(circle) - 1), key=lambda position: ids[circle[position]])
        turned = [*circle[start:-1], *circle[: start + 1]]
        problem = f"the stages form a cycle: {' reads '.join(turned)}"
        raise ConfigError(problem, path=f"stages[{ids[turned[0]]}].inputs") from None


def _check_outputs(pipeline: Pipeline) -> None:
    if not pipeline.outputs():
        raise ConfigError("no stage delivers its output", path="stages", hint="set final_output: true on one")
    for stage in pipeline.stages:
        if not stage.final_output and not pipeline.consumers(stage):
            hint = "set final_output: true, or let another stage read it"
            path = f"stages[{stage.stage_id}].final_output"
            raise ConfigError("nobody gets the output of this stage", path=path, value=False, hint=hint)


def _check_pair(pipeline: Pipeline) -> None:
    """Prefill and decode: one pair at most, alike in what the hand-over of the KV cache needs."""
    prefills = [stage for stage in pipeline.stages if stage.is_prefill_only]
    decodes = [stage for stage in pipeline.stages if stage.is_decode_only]
    for flag, found in (("is_prefill_only", prefills), ("is_decode_only", decodes)):
        if len(found) > 1:
            problem = f"{found[0].name!r} is {flag} too: a pipeline has one prefill/decode pair"
            raise ConfigError(problem, path=f"stages[{found[1].stage_id}].{flag}", value=True)
    if not prefills and not decodes:
        return
    if len(prefills) != len(decodes):
        alone, missing = (prefills[0], "is_decode_only") if prefills else (decodes[0], "is_prefill_only")
        hint = f"set {missing}: true on the other half"
        path = f"stages[{alone.stage_id}]"
        raise ConfigError(f"{alone.name!r} is half of a prefill/decode pair", path=path, hint=hint)
    prefill, decode = prefills[0], decodes[0]
    if prefill is decode:
        path = f"stages[{decode.stage_id}].is_decode_only"
        raise ConfigError("a stage is one half of the pair, not both", path=path, value=True)
    _check_hand_over(prefill, decode)
    others = [stage.name for stage in pipeline.consumers(prefill) if stage is not decode]
    if others or prefill.final_output:
        who = f"{others[0]!r} reads it" if others else "the client would get it"
        problem = f"a prefill stage has an output for its decode stage only, and {who}"
        raise ConfigError(problem, path=f"stages[{prefill.stage_id}]")


def _check_companions(pipeline: Pipeline) -> None:
    """Only the first stage makes companions, and only for a stage that waits for all of them."""
    for stage in pipeline.stages:
        if stage.prompt_expand is None:
            continue
        path = f"stages[{stage.stage_id}].prompt_expand"
        if stage.stage_id != 0 or stage.inputs:
            problem = "only the first stage, which reads the request's prompt, makes companions"
            raise ConfigError(problem, path=path, value=stage.prompt_expand, hint="move it to stages[0]")
        if stage.is_prefill_only:
            raise ConfigError("a prefill stage makes no companions", path=path, value=stage.prompt_expand)
        if not any(other.edge == "whole" for other in pipeline.consumers(stage)):
            hint = f"want a later stage with inputs: [{stage.name}] and edge: whole"
            raise ConfigError("no stage reads the companions", path=path, value=stage.prompt_expand, hint=hint)


def _check_hand_over(prefill: Stage, decode: Stage) -> None:
    at = f"stages[{decode.stage_id}]"
    for stage in (prefill, decode):
        if stage.stage_type != "llm":
            path = f"stages[{stage.stage_id}].stage_type"
            raise ConfigError("only llm stages make a prefill/decode pair", path=path, value=stage.stage_type)
    if decode.inputs != (prefill.name,):
        problem, hint = "the decode stage reads the prefill stage only", f"want inputs: [{prefill.name}]"
        raise ConfigError(problem, path=f"{at}.inputs", value=list(decode.inputs), hint=hint)
    for stage, right in ((prefill, "kv_producer"), (decode, "kv_consumer")):
        if stage.edge == "stream":
            path = f"stages[{stage.stage_id}].edge"
            raise ConfigError("both halves of the pair need the whole prompt", path=path, value="stream")
        connector = _transfer(stage).get("kv_connector")
        if connector not in (None, stage.connector or connector):
            path = f"stages[{stage.stage_id}].engine_args.kv_transfer_config.kv_connector"
            raise ConfigError(f"want {stage.connector}, as `connector` says", path=path, value=connector)
        role = _transfer(stage).get("kv_role")
        if role not in (None, right, "kv_both"):
            path = f"stages[{stage.stage_id}].engine_args.kv_transfer_config.kv_role"
            raise ConfigError(f"want {right}", path=path, value=role)
    connectors = [stage.connector or _transfer(stage).get("kv_connector") for stage in (prefill, decode)]
    if connectors[0] != connectors[1]:
        problem, hint = "both halves of the pair need the same connector", f"{prefill.name} has {connectors[0]!r}"
        raise ConfigError(problem, path=f"{at}.connector", value=connectors[1], hint=hint)
    if connectors[0] is None:
        hint = "such as connector: NixlConnector, on both"
        raise ConfigError("a prefill/decode pair needs a connector", path=f"{at}.connector", hint=hint)
    for name, default in _ALIKE.items():
        mine, other = (
            getattr(stage, name) if name in Stage.model_fields else stage.engine_args.get(name, default)
            for stage in (decode, prefill)
        )
        if mine != other:
            path = f"{at}.{name}" if name in Stage.model_fields else f"{at}.engine_args.{name}"
            hint = f"{prefill.name} has {other!r}"
            raise ConfigError(f"both halves of the pair need the same {name}", path=path, value=mine, hint=hint)


def _transfer(stage: Stage) -> dict[str, Any]:
    config = stage.engine_args.get("kv_transfer_config")
    return config if isinstance(config, dict) else {}

"""`--set STAGE.FIELD=VALUE`: sampling parameters from the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer

from stagemesh.client.pipelines import PipelineInfo


def parse_settings(settings: Sequence[str], pipeline: PipelineInfo) -> dict[str, dict[str, Any]]:
    """Sampling parameters by stage name.

    A value is JSON where it can be, else a text. The stage is a name or an id; it may be left out where there is just
    one. Further dots reach into a field: `writer.structured_outputs.regex=...`.

    Raises:
        typer.BadParameter: that says what is wrong.
    """
    result: dict[str, dict[str, Any]] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise typer.BadParameter(f"{setting!r}: want STAGE.FIELD=VALUE, such as painter.seed=7")
        stage, fields = _split(path.strip(), pipeline, setting)
        target = result.setdefault(stage, {})
        for name in fields[:-1]:
            target = target.setdefault(name, {})
            if not isinstance(target, dict):
                raise typer.BadParameter(f"{setting!r}: {name} was given a value of its own before")
        target[fields[-1]] = _value(text.strip())
    return result


def _split(path: str, pipeline: PipelineInfo, setting: str) -> tuple[str, list[str]]:
    first, *rest = path.split(".")
    for stage in pipeline.stages:
        if first in (stage.name, str(stage.stage_id)) and rest:
            fields = rest
            break
    else:
        if len(pipeline.stages) != 1:
            names = ", ".join(stage.name for stage in pipeline.stages)
            raise typer.BadParameter(f"{setting!r}: {first!r} is no stage of {pipeline.name}; its stages are {names}")
        stage, fields = pipeline.stages[0], [first, *rest]
    if not all(fields):
        raise typer.BadParameter(f"{setting!r}: want STAGE.FIELD=VALUE, such as painter.seed=7")
    return stage.name, fields


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

"""The sampling parameters that a stage may give defaults for: those of the wire contract, and a free `extra`."""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from stagemesh.config.errors import ConfigError, suggest
from stagemesh.config.model import Stage
from stagemesh.v1 import sampling_pb2 as sampling_pb

_UNSIGNED = (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64)


@cache
def known_parameters(stage_type: str) -> tuple[str, ...]:
    """Names of the typed parameters of a kind of stage, `extra` among them."""
    return tuple(_fields(stage_type))


def check_sampling(stage: Stage, path: str) -> None:
    """Check names and types of `default_sampling_params`. Ranges are checked where requests are.

    Raises:
        ConfigError: an unknown name, with a did-you-mean, or a value of another type.
    """
    fields = _fields(stage.stage_type)
    for name, value in stage.default_sampling_params.items():
        at = f"{path}.{name}"
        if name not in fields:
            hint = suggest(name, fields) or "what only the engine knows goes into `extra`"
            raise ConfigError("unknown sampling parameter", path=at, hint=hint)
        if value is not None:
            _check_type(fields[name], value, at)


@cache
def _fields(stage_type: str) -> dict[str, FieldDescriptor]:
    message = sampling_pb.DiffusionSamplingParams if stage_type == "diffusion" else sampling_pb.LlmSamplingParams
    return dict(message.DESCRIPTOR.fields_by_name)


def _check_type(field: FieldDescriptor, value: Any, path: str) -> None:
    if field.type == FieldDescriptor.TYPE_MESSAGE:  # a map, a Struct, or structured outputs
        if not isinstance(value, dict):
            raise ConfigError("want a mapping", path=path, value=value)
        return
    if field.is_repeated and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_scalar(field, item, f"{path}[{index}]")
        return
    _check_scalar(field, value, path)


def _check_scalar(field: FieldDescriptor, value: Any, path: str) -> None:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        want, good = "true or false", isinstance(value, bool)
    elif kind == FieldDescriptor.CPPTYPE_STRING:
        want, good = "a text", isinstance(value, str)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        want, good = "a number", False
    elif kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        want, good = "a number", True
    elif field.type in _UNSIGNED:
        want, good = "a whole number from 0", isinstance(value, int) and value >= 0
    else:
        want, good = "a whole number", isinstance(value, int)
    if not good:
        raise ConfigError(f"want {want}", path=path, value=value)

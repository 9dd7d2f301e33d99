"""How the devices a pipeline file lists are shared among a stage's replicas (pure functions)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stagemesh.config.errors import ConfigError
from stagemesh.config.model import Stage

_DEVICE = re.compile(r"(?:[a-z]+:)?([0-9]{1,6})")


def devices_per_replica(stage: Stage) -> int:
    """Devices one replica computes on.

    llm: tensor parallel x pipeline parallel x local data parallel. diffusion: the world size of its parallel config.
    """
    arguments = stage.engine_args
    if stage.stage_type == "diffusion":
        parallel = arguments.get("parallel_config") or {}
        if not isinstance(parallel, dict):
            path = f"stages[{stage.stage_id}].engine_args.parallel_config"
            raise ConfigError("want a mapping", path=path, value=parallel)
        if "world_size" in parallel:
            return _count(stage, "parallel_config.world_size", parallel["world_size"])
        size = 1
        for name in (
            "ulysses_degree", "ring_degree", "cfg_parallel_size", "tensor_parallel_size", "pipeline_parallel_size",
            "data_parallel_size",
        ):  # fmt: skip
            size *= _count(stage, f"parallel_config.{name}", parallel.get(name, 1))
        if "ulysses_degree" not in parallel and "ring_degree" not in parallel:
            size *= _count(stage, "parallel_config.sequence_parallel_size", parallel.get("sequence_parallel_size", 1))
        return size
    size = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size *= _count(stage, name, arguments.get(name, 1))
    local = arguments.get("data_parallel_size_local")
    if local is None:
        local = arguments.get("data_parallel_size", 1)
    return size * _count(stage, "data_parallel_size", local)


def _count(stage: Stage, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        path = f"stages[{stage.stage_id}].engine_args.{name}"
        raise ConfigError("want a whole number from 1", path=path, value=value)
    return value


def split_devices(
    devices: str | Sequence[int] | None, num_replicas: int, per_replica: int, *, path: str = "runtime.devices"
) -> list[list[int]] | None:
    """Share a device list among replicas.

    Returns:
        A group of logical device numbers for each replica, or None when placement chooses (unset or "auto").

    For n replicas of d devices: n <= 1 takes the list as written; a list of n x d is a *pool*, split into consecutive
    groups; a list of d within [0, d) is a *template*, moved up by r x d for replica r.

    Raises:
        ConfigError: any other length, or entries that are not device numbers.
    """
    numbers = parse_devices(devices, path=path)
    if numbers is None:
        return None
    if num_replicas <= 1:
        return [numbers]
    length, pool = len(numbers), num_replicas * per_replica
    if length == pool:
        return [numbers[start : start + per_replica] for start in range(0, pool, per_replica)]
    if length == per_replica:
        if any(number >= per_replica for number in numbers):
            raise ConfigError(
                f"a template for replicas of {per_replica} holds numbers from 0 to {per_replica - 1}",
                path=path,
                value=devices,
                hint=f"or list all {pool} devices",
            )
        return [[number + replica * per_replica for number in numbers] for replica in range(num_replicas)]
    raise ConfigError(
        f"{length} devices for {num_replicas} replicas of {per_replica}",
        path=path,
        value=devices,
        hint=f"list {pool} devices (a pool) or {per_replica} (a template)",
    )


def parse_devices(devices: str | Sequence[int] | None, *, path: str = "runtime.devices") -> list[int] | None:
    """Device numbers as written; None for unset and "auto". Raises ConfigError."""
    if devices is None or devices == "auto":
        return None
    parts = devices.split(",") if isinstance(devices, str) else devices
    wrong = ConfigError('want device numbers such as "0,1", or auto', path=path, value=devices)
    if not isinstance(parts, list | tuple):
        raise wrong
    numbers = []
    for part in parts:
        match = _DEVICE.fullmatch(str(part).strip())
        if match is None:
            raise wrong
        numbers.append(int(match[1]))
    if len(set(numbers)) != len(numbers):
        raise ConfigError("a device is listed twice", path=path, value=devices)
    return numbers

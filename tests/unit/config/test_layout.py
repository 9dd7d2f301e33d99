"""How device lists are shared among replicas (P1, P2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.config import ConfigError, Stage
from stagemesh.config.layout import devices_per_replica, split_devices

TABLE = [
    # devices, replicas, per replica, groups
    (None, 3, 2, None),
    ("auto", 3, 2, None),
    ("0", 1, 1, [[0]]),
    ("3,1", 1, 1, [[3, 1]]),
    ("0,1", 0, 1, [[0, 1]]),
    ("1,2,3,4", 2, 2, [[1, 2], [3, 4]]),
    ("0,1", 4, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ("1,0", 2, 2, [[1, 0], [3, 2]]),
    ("0", 3, 1, [[0], [1], [2]]),
    ("5,7", 2, 1, [[5], [7]]),
    ("cuda:0, cuda:1", 2, 1, [[0], [1]]),
    ((2, 3), 2, 1, [[2], [3]]),
]
WRONG = [
    ("0,1,2", 2, 2, "list 4 devices (a pool) or 2 (a template)"),
    ("4,5", 4, 2, "a template for replicas of 2 holds numbers from 0 to 1"),
    ("a,b", 2, 2, "want device numbers"),
    ("0,0", 2, 1, "listed twice"),
    ("0,,1", 2, 1, "want device numbers"),
    ("-1", 1, 1, "want device numbers"),
    ("²", 1, 1, "want device numbers"),
    ("9" * 5000, 1, 1, "want device numbers"),
    ("", 1, 1, "want device numbers"),
]


@pytest.mark.parametrize(("devices", "replicas", "each", "groups"), TABLE)
def test_split(devices, replicas: int, each: int, groups) -> None:
    assert split_devices(devices, replicas, each) == groups


@pytest.mark.parametrize(("devices", "replicas", "each", "says"), WRONG)
def test_split_refuses(devices, replicas: int, each: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_devices(devices, replicas, each)
    assert says in str(caught.value)


@given(
    st.integers(2, 8), st.integers(1, 8),
    st.lists(st.integers(0, 200), unique=True, min_size=1, max_size=64),
)  # fmt: skip
def test_layout_never_gives_a_device_twice_and_never_loses_one(replicas: int, each: int, devices: list[int]) -> None:
    try:
        groups = split_devices(devices, replicas, each)
    except ConfigError:
        return
    assert groups is not None and len(groups) == replicas
    given_out = [device for group in groups for device in group]
    assert len(set(given_out)) == len(given_out)
    assert all(len(group) == each for group in groups)
    if len(devices) == replicas * each:
        assert sorted(given_out) == sorted(devices)
    else:
        assert sorted(given_out) == list(range(replicas * each))


@pytest.mark.parametrize(
    ("kind", "arguments", "count"),
    [
        ("llm", {}, 1),
        ("llm", {"tensor_parallel_size": 4}, 4),
        ("llm", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 2}, 12),
        ("llm", {"data_parallel_size": 8, "data_parallel_size_local": 2}, 2),
        ("llm", {"data_parallel_size": 2, "data_parallel_size_local": None}, 2),
        ("diffusion", {}, 1),
        ("diffusion", {"parallel_config": None}, 1),
        ("diffusion", {"tensor_parallel_size": 4}, 1),
        ("diffusion", {"parallel_config": {"world_size": 6}}, 6),
        ("diffusion", {"parallel_config": {"ulysses_degree": 2, "ring_degree": 2, "cfg_parallel_size": 2}}, 8),
        ("diffusion", {"parallel_config": {"sequence_parallel_size": 3}}, 3),
    ],
)
def test_devices_per_replica(kind: str, arguments: dict, count: int) -> None:
    assert devices_per_replica(Stage(name="s", stage_type=kind, engine_args=arguments)) == count


def test_parallelism_that_is_no_count_is_refused() -> None:
    stage = Stage(name="s", engine_args={"tensor_parallel_size": 0})
    with pytest.raises(ConfigError, match=r"stages\[0\]\.engine_args\.tensor_parallel_size: 0: want a whole number"):
        devices_per_replica(stage)


def test_parallel_config_that_is_no_mapping_is_refused() -> None:
    stage = Stage(name="s", stage_type="diffusion", engine_args={"parallel_config": "2"})
    with pytest.raises(ConfigError, match=r"stages\[0\]\.engine_args\.parallel_config: '2': want a mapping"):
        devices_per_replica(stage)

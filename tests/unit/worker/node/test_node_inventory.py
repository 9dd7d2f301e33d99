"""What a node offers: core sets, and GPUs as CUDA_VISIBLE_DEVICES leaves them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.v1 import device_pb2 as device_pb
from stagemesh_worker.node import inventory
from stagemesh_worker.node.cores import InventoryError, core_sets, cpu_quota, split_cores
from stagemesh_worker.node.nvidia import visible_devices


class NoGpuError(Exception):
    """NVML's error type in these tests."""


class FakeNvml:
    """NVML with three GPUs and one MIG instance."""

    NVMLError = NoGpuError
    uuids = ("GPU-aaaa1111", "GPU-bbbb2222", "GPU-bbbb3333")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.uuids[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        if uuid != b"MIG-cccc":
            raise NoGpuError
        return "MIG-cccc"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return f"GPU of {handle}".encode()

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if handle == "MIG-cccc":
            raise NoGpuError
        return SimpleNamespace(total=80 << 30)


def gpus(variable: str | None) -> list[tuple[str, str, str]]:
    return [(device.id, device.physical_id, device.name) for device in visible_devices(FakeNvml(), variable)]


def test_all_gpus_are_offered_when_no_variable_says_less() -> None:
    assert [(name, physical) for name, physical, _ in gpus(None)] == [
        ("cuda:0", "0"), ("cuda:1", "1"), ("cuda:2", "2")
    ]  # fmt: skip
    assert visible_devices(FakeNvml(), None)[0].memory_bytes == 80 << 30


def test_the_variable_renumbers_gpus_by_index_and_by_uuid() -> None:
    assert gpus("2,0") == [("cuda:0", "2", "GPU of GPU-bbbb3333"), ("cuda:1", "0", "GPU of GPU-aaaa1111")]
    assert gpus("GPU-bbbb2222,GPU-aaaa") == [
        ("cuda:0", "1", "GPU of GPU-bbbb2222"), ("cuda:1", "0", "GPU of GPU-aaaa1111")
    ]  # fmt: skip


def test_a_mig_instance_keeps_its_uuid() -> None:
    [device] = visible_devices(FakeNvml(), "MIG-cccc")
    assert (device.id, device.physical_id, device.memory_bytes) == ("cuda:0", "MIG-cccc", 0)


@pytest.mark.parametrize("variable", ["", "-1", "9", "GPU-bbbb", "MIG-dddd", "junk"])
def test_what_follows_an_entry_that_is_no_gpu_is_not_seen(variable: str) -> None:
    assert gpus(variable) == [], "an ambiguous or unknown entry is no GPU"
    assert [physical for _, physical, _ in gpus(f"1,{variable},0")] == ["1"]


def test_a_small_machine_has_a_core_a_set_and_a_large_one_has_eight_sets() -> None:
    assert split_cores([0, 1, 2]) == [[0], [1], [2]]
    assert [len(members) for members in split_cores(list(range(64)))] == [8] * 8
    assert sorted(len(members) for members in split_cores(list(range(12)))) == [1, 1, 1, 1, 2, 2, 2, 2]


@given(st.lists(st.integers(0, 500), min_size=1, max_size=200, unique=True).map(sorted), st.integers(0, 20))
def test_core_sets_are_disjoint_even_and_lose_no_core_but_a_remainder(cores: list[int], per_set: int) -> None:
    if per_set > len(cores):
        with pytest.raises(InventoryError, match=f"--cores-per-device {per_set}: this node has {len(cores)} cores"):
            split_cores(cores, per_set)
        return
    sets = split_cores(cores, per_set or None)
    members = [core for one in sets for core in one]
    assert len(members) == len(set(members))
    if per_set:
        assert {len(one) for one in sets} == {per_set}
        assert len(cores) - len(members) < per_set
    else:
        assert members == cores
        assert max(map(len, sets)) - min(map(len, sets)) <= 1
        assert len(sets) <= 8


def test_core_sets_say_their_cores_and_the_machine() -> None:
    first, second = core_sets([2, 3, 6, 7], 2)
    assert (first.id, list(first.cores), first.kind) == ("cpu:0", [2, 3], device_pb.DEVICE_KIND_CPU)
    assert list(second.cores) == [6, 7]
    assert first.name
    assert first.memory_bytes > 1 << 20


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "cuda_devices", list)
    monkeypatch.setattr(inventory.os, "sched_getaffinity", lambda pid: {1, 3})


@pytest.mark.usefixtures("no_gpus")
def test_devices_are_picked_by_id_in_the_order_asked_for() -> None:
    assert [list(device.cores) for device in inventory.discover()] == [[1], [3]]
    assert [device.id for device in inventory.discover(only=["cpu:1", "cpu:0"])] == ["cpu:1", "cpu:0"]
    with pytest.raises(InventoryError, match="'cuda:0' is not on this node; it has cpu:0, cpu:1"):
        inventory.discover(only=["cuda:0"])
    with pytest.raises(InventoryError, match="a device is named twice"):
        inventory.discover(only=["cpu:0", "cpu:0"])


def test_core_sets_stand_beside_gpus_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "cuda_devices", lambda: visible_devices(FakeNvml(), "1"))
    monkeypatch.setattr(inventory.os, "sched_getaffinity", lambda pid: {0, 1})
    assert [device.id for device in inventory.discover()] == ["cuda:0"]
    assert [device.id for device in inventory.discover(cores_per_device=2)] == ["cuda:0", "cpu:0"]
    assert [device.id for device in inventory.discover(only=["cpu:1", "cuda:0"])] == ["cpu:1", "cuda:0"]


def test_the_narrowest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    group = tmp_path / "cgroup" / "pod" / "container"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("max 100000\n")
    (group.parent / "cpu.max").write_text("150000 100000\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/pod/container\n")
    assert cpu_quota(tmp_path / "cgroup", membership) == pytest.approx(1.5)
    (group.parent / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path / "cgroup", membership) is None
    assert cpu_quota(tmp_path / "nothing", tmp_path / "nothing") is None


def test_the_older_kind_of_quota_counts_too(tmp_path: Path) -> None:
    group = tmp_path / "cgroup" / "cpu" / "box"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("50000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    membership = tmp_path / "membership"
    membership.write_text("4:cpu,cpuacct:/box\n")
    assert cpu_quota(tmp_path / "cgroup", membership) == pytest.approx(0.5)
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quota(tmp_path / "cgroup", membership) is None

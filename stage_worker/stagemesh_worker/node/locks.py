"""One lock per device on disk, so that two node agents on a host never give a device twice."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
from collections.abc import Iterable
from pathlib import Path

from stagemesh.v1 import device_pb2 as device_pb
from stagemesh_worker.rundir import run_root

POLL_S = 0.1


class DeviceBusy(RuntimeError):
    """Another process has the device; the text names it."""


class DeviceLocks:
    """The locks of this agent. A device stays locked as long as one of the agent's replicas has it."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or run_root() / "locks"
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._held: dict[str, tuple[int, int]] = {}
        """Lock name -> (descriptor, how many replicas use it)."""

    async def acquire(self, devices: Iterable[device_pb.Device], timeout_s: float) -> tuple[str, ...]:
        """Lock all `devices`, waiting up to `timeout_s` in all; returns the names for `release`.

        Raises:
            DeviceBusy: another process kept one; none of these locks is held then.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        taken: list[str] = []
        try:
            # In one order everywhere, so that two agents that want the same two devices cannot wait for each other.
            for name in sorted(name for device in devices for name in lock_names(device)):
                await self._acquire(name, deadline)
                taken.append(name)
        except BaseException:
            self.release(taken)
            raise
        return tuple(taken)

    async def _acquire(self, name: str, deadline: float) -> None:
        if name in self._held:
            descriptor, users = self._held[name]
            self._held[name] = (descriptor, users + 1)
            return
        path = self._directory / f"{name}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if asyncio.get_running_loop().time() >= deadline:
                        holder = path.read_text().strip() or "unknown"
                        raise DeviceBusy(f"device {name} is in use by process {holder} on this host") from None
                await asyncio.sleep(POLL_S)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._held[name] = (descriptor, 1)

    def release(self, names: Iterable[str]) -> None:
        """Give up one use of each lock."""
        for name in names:
            descriptor, users = self._held[name]
            if users > 1:
                self._held[name] = (descriptor, users - 1)
                continue
            del self._held[name]
            os.close(descriptor)


def lock_names(device: device_pb.Device) -> list[str]:
    """What a device is made of on its host, as file names: its cores, or its physical id."""
    if device.kind == device_pb.DEVICE_KIND_CPU:
        return [f"core-{core}" for core in device.cores]
    return [re.sub(r"[^A-Za-z0-9]+", "-", f"{device.id.partition(':')[0]}-{device.physical_id or device.id}")]

"""Real replica processes behind a test's gateway, without a node agent: the test kills and replaces them itself."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from dataclasses import dataclass

from stagemesh_worker.replica import control
from tests.mesh.harness import Cluster

START_S = 60.0
_incarnations = itertools.count(1)


@dataclass
class RealReplica:
    """A replica process and its control socket."""

    process: asyncio.subprocess.Process
    writer: asyncio.StreamWriter

    async def kill(self) -> None:
        """SIGKILL, to the process and what it started."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
        self.writer.close()


async def start_real_replica(mesh: Cluster, stage: str, replica_id: int) -> RealReplica:
    """Spawn a replica as a node agent does, and make it a member once it is ready."""
    settings = mesh.pipeline.stage(stage).model_dump(mode="json")
    incarnation = f"real-{next(_incarnations)}"
    ours, theirs = socket.socketpair()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stagemesh_worker.replica", "--control-fd", str(theirs.fileno()),
        pass_fds=(theirs.fileno(),), start_new_session=True,
    )  # fmt: skip
    theirs.close()
    reader, writer = await asyncio.open_connection(sock=ours, limit=control.MAX_LINE_BYTES)
    devices = (control.AssignedDevice("cpu:0", tuple(sorted(os.sched_getaffinity(0)))),)
    assign = control.Assign(
        mesh.pipeline.name, "revision", settings, replica_id, incarnation, devices, host_id="this-host"
    )
    writer.write(control.encode(assign))
    async with asyncio.timeout(START_S):
        while not isinstance(message := control.decode(await reader.readline()), control.Ready):
            assert not isinstance(message, control.Failed), message
    mesh.membership.ready(mesh.pipeline.name, stage, replica_id, message.endpoint, incarnation)
    await mesh.linked(stage, replica_id)
    return RealReplica(process, writer)

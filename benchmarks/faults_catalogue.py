"""The faults that `faults.py` measures: how each is done and undone, and what should be noticed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.mesh.faults import hostile
from tests.mesh.faults.processes import Process, Processes
from tests.mesh.faults.proxy import Proxy, Wire

SLOW_S = 0.3
SILENT = 500
GENERATE, EXECUTE = "/stagemesh.v1.InferenceService/Generate", "/stagemesh.v1.StageService/Execute"


@dataclass(slots=True)
class Scene:
    """The mesh that is hurt; node `a` is on the wire, and its replica is the victim."""

    mesh: Processes
    proxy: Proxy
    locks: Path
    head: Process
    first: Process | None = None
    held: ExitStack = field(default_factory=ExitStack)
    _log_at: tuple[float, int] = (0.0, 0)

    def start_first_node(self) -> None:
        self.first = self.mesh.start(
            "stagemesh_worker", "--head", self.proxy.address, "--node-id", "a", "--devices", "cpu:0"
        )

    @property
    def node(self) -> Process:
        assert self.first is not None
        return self.first

    @property
    def victim(self) -> int:
        """Process id of the replica on the first node."""
        return next(row.report.pid for row in self.mesh.replicas() if row.node_id == "a")

    @property
    def ports(self) -> list[str]:
        return [self.mesh.address, *(row.report.endpoint for row in self.mesh.ready(2))]

    def mark_log(self) -> None:
        """What the node says from now on is `log_since`."""
        self._log_at = (time.monotonic(), len(self.node.lines))

    def log_since(self, _: float) -> list[str]:
        return list(self.node.lines)[self._log_at[1] :]


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to hurt a mesh. `event` are words of the head's event, `log_line` of the node's log; neither: nothing
    should be noticed. Without `repair` the mesh heals by itself.
    """

    name: str
    strike: Callable[[Scene], None]
    repair: Callable[[Scene], None] | None = None
    event: str = ""
    log_line: str = ""


def _kill_replica(scene: Scene) -> None:
    os.kill(scene.victim, signal.SIGKILL)


def _kill_head(scene: Scene) -> None:
    scene.mark_log()
    scene.head.kill()


def _restart_head(scene: Scene) -> None:
    scene.head = scene.mesh.start_head()


def _stop_replica(scene: Scene) -> None:
    pid = scene.victim
    scene.held.callback(os.kill, pid, signal.SIGCONT)
    os.kill(pid, signal.SIGSTOP)


def _wire(**how: object) -> Callable[[Scene], None]:
    return lambda scene: scene.proxy.set(Wire(**how))  # type: ignore[arg-type]


def _lock_folder_becomes_a_file(scene: Scene) -> None:
    aside = scene.locks.with_suffix(".aside")

    def undo() -> None:
        scene.locks.unlink()
        aside.rename(scene.locks)

    # Its successor needs the folder anew: a replica that is merely restarted keeps the locks that its agent has.
    scene.node.kill()
    scene.locks.rename(aside)
    scene.locks.touch()
    scene.held.callback(undo)
    scene.start_first_node()
    scene.mark_log()


def _folder_is_back(scene: Scene) -> None:
    scene.held.close()
    scene.node.wait()
    scene.start_first_node()


def _garbage(scene: Scene) -> None:
    for port in scene.ports:
        hostile.garbage(port, rounds=5)


def _oversized(scene: Scene) -> None:
    head, *replicas = scene.ports
    for port, method in [(head, GENERATE), *((replica, EXECUTE) for replica in replicas)]:
        hostile.oversized(port, method)


def _silence(scene: Scene) -> None:
    scene.held.enter_context(hostile.silent(scene.ports, SILENT))


def _let_go(scene: Scene) -> None:
    scene.held.close()


FAULTS = [
    Fault("clean exit of a node", lambda s: s.node.signal(signal.SIGTERM), lambda s: _again(s), "node.gone"),
    Fault("kill -9 of a replica", _kill_replica, event="replica."),
    Fault("kill -9 of a node agent", lambda s: s.node.kill(), lambda s: s.start_first_node(), "node.suspect"),
    Fault("kill -9 of the head", _kill_head, _restart_head, log_line="no session with the head"),
    Fault("SIGSTOP of a replica", _stop_replica, _let_go, "replica.suspect"),
    Fault("SIGSTOP of a node agent", lambda s: s.node.signal(signal.SIGSTOP),
          lambda s: s.node.signal(signal.SIGCONT), "node.suspect"),
    Fault("link of a node cut, both ways", _wire(up=False, down=False), _wire(), "node.suspect"),
    Fault("link of a node cut, node to head", _wire(up=False), _wire(), "node.suspect"),
    Fault("link of a node cut, head to node", _wire(down=False), _wire(), "node.suspect"),
    Fault(f"link of a node slow ({SLOW_S:g} s a piece)", _wire(delay_s=SLOW_S), _wire()),
    Fault("node agent killed, started with a lock folder it cannot use", _lock_folder_becomes_a_file, _folder_is_back,
          log_line="is no directory"),
    Fault("garbage on every port", _garbage),
    Fault("oversized messages on every port", _oversized),
    Fault(f"{SILENT} silent connections", _silence, _let_go),
]  # fmt: skip


def _again(scene: Scene) -> None:
    scene.node.wait()
    scene.start_first_node()

"""Every fault: how it is done and undone, what should be noticed, and what clients may see of it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from tests.mesh.faults import hostile, small_disk, wall_clock
from tests.mesh.faults.proxy import Wire
from tests.mesh.faults.scene import Scene, free_address
from tests.mesh.faults.small_disk import SmallDisk
from tests.mesh.faults.wall_clock import WallClock

SLOW_S = 0.3
SILENT = 500
CLOCK_STEP_S = 6 * 3600
METHODS = {
    "head": "/stagemesh.v1.InferenceService/Generate",
    "registry": "/stagemesh.v1.RegistryService/Join",
    "gateway": "/stagemesh.v1.InferenceService/Generate",
    "health": "/grpc.health.v1.Health/Watch",
    "replica": "/stagemesh.v1.StageService/Execute",
}
"""A method at each port; the metrics are no gRPC."""
MALFORMED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}


def nothing_needed() -> str:
    """For faults that can be had anywhere."""
    return ""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to hurt a mesh. `event` are words of the head's event, `log_line` of the first node's log; neither:
    nothing should be noticed. Without `repair` the mesh heals by itself.
    """

    name: str
    strike: Callable[[Scene], None]
    repair: Callable[[Scene], None] | None = None
    event: str = ""
    log_line: str = ""
    prepare: Callable[[Scene], None] | None = None
    """Changes a mesh that is not yet started."""
    starts_a_replica: bool = False
    """After it another process than before serves a slot; else no model is loaded twice."""
    happens_once: bool = False
    """The mesh is not what it was, also when it is well again."""
    is_watched_for_a_lease: bool = False
    """To be sure that nothing is noticed."""
    clients_may_see: str = ""
    """Words of the errors that clients may get while it lasts; empty: none fails."""
    why_not: Callable[[], str] = nothing_needed
    """Why this machine cannot have it; empty when it can."""


def _kill_head(scene: Scene) -> None:
    scene.mark_log()
    scene.head.kill()


def _stop_replica(scene: Scene) -> None:
    pid = scene.victim

    def wake() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    scene.blow.callback(wake)
    os.kill(pid, signal.SIGSTOP)


def _go_on(number_of: Callable[[Scene], int]) -> Callable[[Scene], None]:
    return lambda scene: os.kill(number_of(scene), signal.SIGCONT)


def _wire(**how: object) -> Callable[[Scene], None]:
    return lambda scene: scene.proxy.set(Wire(**how))  # type: ignore[arg-type]


def _start_a_again(scene: Scene) -> None:
    scene.a.wait()
    scene.start_a()


def _lock_folder_becomes_a_file(scene: Scene) -> None:
    # Its successor needs the folder anew: a replica that is merely restarted keeps the locks that its agent has.
    scene.a.kill()
    scene.locks.rename(scene.locks.with_suffix(".aside"))
    scene.locks.touch()
    scene.start_a()


def _folder_is_back(scene: Scene) -> None:
    scene.locks.unlink()
    scene.locks.with_suffix(".aside").rename(scene.locks)
    _start_a_again(scene)


def _on_small_disk(scene: Scene) -> None:
    scene.disk = SmallDisk(scene.locks)
    scene.replicas_at_first = 1  # on the other node: this one has its first to start yet


def _fill_disk(scene: Scene) -> None:
    assert scene.disk is not None
    scene.disk.fill(scene.a.pid)
    scene.scale(2)


def _free_disk(scene: Scene) -> None:
    assert scene.disk is not None
    scene.disk.free(scene.a.pid)


def _with_own_clock(scene: Scene) -> None:
    scene.clock = WallClock(scene.mesh.folder)
    scene.mesh.environment |= scene.clock.environment


def _step_clock(seconds: int) -> Callable[[Scene], None]:
    def step(scene: Scene) -> None:
        assert scene.clock is not None
        assert all(scene.clock.is_read_by(process.pid) for process in scene.mesh.survivors())
        scene.clock.step(seconds)

    return step


def _open_every_port(scene: Scene) -> None:
    """A head with a port for nodes, a gateway and metrics; a node with a port for probes."""
    scene.ports = {name: free_address() for name in ("registry", "gateway", "metrics", "health")}
    scene.head_arguments += [
        "--registry-listen", scene.ports["registry"], "--metrics-listen", scene.ports["metrics"],
        "--gateways", "1", "--gateway-listen", scene.ports["gateway"],
    ]  # fmt: skip
    scene.a_arguments += ["--health-listen", scene.ports["health"]]


def _garbage(scene: Scene) -> None:
    for port in scene.every_port.values():
        assert hostile.garbage(port, rounds=5) > 0, port


def _oversized(scene: Scene) -> None:
    for name, port in scene.every_port.items():
        if name == "metrics":
            hostile.oversized_line(port)
            continue
        method = METHODS[name.partition(" ")[0]]
        assert hostile.oversized(port, method) is grpc.StatusCode.RESOURCE_EXHAUSTED, name
        assert hostile.call(port, method, b"\xff" * 100) in MALFORMED, name


def _silence(scene: Scene) -> None:
    scene.blow.enter_context(hostile.silent(list(scene.every_port.values()), SILENT))


FAULTS = [
    Fault("clean exit of a node", lambda s: s.a.signal(signal.SIGTERM), _start_a_again, "node.gone",
          starts_a_replica=True),
    Fault("kill -9 of a replica", lambda s: os.kill(s.victim, signal.SIGKILL), event="replica.",
          starts_a_replica=True),
    Fault("kill -9 of a node agent", lambda s: s.a.kill(), lambda s: s.start_a(), "node.suspect",
          starts_a_replica=True),
    Fault("kill -9 of the head", _kill_head, lambda s: s.start_head(), log_line="no session with the head",
          clients_may_see="no head answers"),
    Fault("SIGSTOP of a replica", _stop_replica, _go_on(lambda s: s.victim), "replica.suspect"),
    Fault("SIGSTOP of a node agent", lambda s: s.a.signal(signal.SIGSTOP), _go_on(lambda s: s.a.pid), "node.suspect"),
    Fault("link of a node cut, both ways", _wire(up=False, down=False), _wire(), "node.suspect"),
    Fault("link of a node cut, node to head", _wire(up=False), _wire(), "node.suspect"),
    Fault("link of a node cut, head to node", _wire(down=False), _wire(), "node.suspect"),
    Fault("link of a node cut, both ways, for longer than its lease", _wire(up=False, down=False), _wire(),
          "node.gone"),
    Fault(f"link of a node slow ({SLOW_S:g} s a piece)", _wire(delay_s=SLOW_S), _wire()),
    Fault("wall clock of all processes 6 h ahead", _step_clock(CLOCK_STEP_S), prepare=_with_own_clock,
          is_watched_for_a_lease=True, why_not=wall_clock.why_not),
    Fault("wall clock of all processes 6 h back", _step_clock(-CLOCK_STEP_S), prepare=_with_own_clock,
          is_watched_for_a_lease=True, why_not=wall_clock.why_not),
    Fault("disk full in the lock folder of a node that is to start its first replica", _fill_disk, _free_disk,
          "replica.failed", prepare=_on_small_disk, starts_a_replica=True, happens_once=True,
          why_not=small_disk.why_not),
    Fault("node agent killed, started with a lock folder it cannot use", _lock_folder_becomes_a_file, _folder_is_back,
          log_line="is no directory", starts_a_replica=True),
    Fault("garbage on every port", _garbage, prepare=_open_every_port),
    Fault("oversized and malformed messages on every port", _oversized, prepare=_open_every_port),
    Fault(f"{SILENT} silent connections, on every port", _silence, prepare=_open_every_port),
]  # fmt: skip

"""A whole mesh on this machine: one head and one node agent, started in order and stopped in order."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from stagemesh.client.errors import StartFailed, invalid
from stagemesh.client.sync import Client
from stagemesh.launch.processes import ChildProcess
from stagemesh.rpc.errors import Reason

NODE_ID = "local"
LOCAL_LABEL = "stagemesh.local=true"
"""By this the head knows the node that its reserved slots are for."""
POLL_S = 0.02
HEAD_START_S = 60.0
"""A head serves in about a second; a loaded machine may need more."""
AT_ONCE_S = 0.5
"""Between two signals; closer ones may arrive as one."""
STOP_NOW_S = 15.0
"""For stopping at once, before it is killed."""
SHOWN_LINES = 20
ERROR_PREFIX = "error: "
"""How a command of ours says what went wrong, in one line."""


class LocalMesh:
    """A head and a node agent as children of this process. Neither outlives it, however it ends."""

    def __init__(
        self,
        head_arguments: Sequence[str],
        worker_arguments: Sequence[str] = (),
        *,
        stages: Sequence[str] = (),
        on_line: Callable[[str, str], None] | None = None,
    ) -> None:
        """Arguments are those of `stagemesh head` and `stagemesh worker`, without ready files and the head's address.

        Args:
            stages: stages to run here, by name or id; empty: all that the pipelines have.
            on_line: gets (process name, line) of everything the two print, from threads.
        """
        self._head_arguments = tuple(head_arguments)
        self._worker_arguments = tuple(worker_arguments)
        self._stages = tuple(stages)
        self._on_line = on_line
        self._scratch: Path | None = None
        self._head: ChildProcess | None = None
        self._worker: ChildProcess | None = None
        self._hurry = threading.Event()
        self.address = ""

    def start(self) -> str:
        """Start both; returns the head's address once it serves. Replicas come up after that.

        Raises:
            StartFailed: with the last lines of who failed.
            InvalidRequest: a stage of `stages` is in no pipeline.
        """
        self._scratch = Path(tempfile.mkdtemp(prefix="stagemesh-up-"))
        try:
            ready_file = self._scratch / "head"
            self._head = self._spawn("head", "stagemesh_head", [*self._head_arguments, "--ready-file", str(ready_file)])
            self.address = self._await_address(ready_file)
            # Nothing of ours stays on the disk of a mesh whose starter may be killed.
            self._remove_scratch()
            stages = [word for stage in self._stage_names() for word in ("--stage", stage)]
            arguments = [
                "--head",
                self.address,
                "--node-id",
                NODE_ID,
                "--label",
                LOCAL_LABEL,
                *stages,
                *self._worker_arguments,
            ]
            self._worker = self._spawn("node", "stagemesh_worker", arguments)
        except BaseException:
            self.stop(now=True)
            raise
        return self.address

    def _stage_names(self) -> list[str]:
        if not self._stages:
            return ["any"]
        with Client(self.address) as client:
            known = [stage for pipeline in client.list_pipelines() for stage in pipeline.stages]
        names = [
            stage.name for wanted in self._stages for stage in known if wanted in (stage.name, str(stage.stage_id))
        ]
        for wanted in self._stages:
            if not any(wanted in (stage.name, str(stage.stage_id)) for stage in known):
                choices = ", ".join(f"{stage.stage_id} ({stage.name})" for stage in known)
                raise invalid("stages", wanted, f"no such stage; there are {choices}")
        return names

    def _spawn(self, name: str, module: str, arguments: Sequence[str]) -> ChildProcess:
        assert self._scratch is not None
        child = ChildProcess(name, module, arguments, scratch=self._scratch, on_line=self._on_line)
        child.start()
        return child

    def _await_address(self, ready_file: Path) -> str:
        deadline = time.monotonic() + HEAD_START_S
        while time.monotonic() < deadline:
            self.check()
            if ready_file.exists():
                return ready_file.read_text().strip()
            time.sleep(POLL_S)
        raise _start_failed(f"the head did not serve within {HEAD_START_S:g} s", self._head)

    def check(self) -> None:
        """Raise StartFailed, with its last lines, when one of the two has ended."""
        for child in (self._head, self._worker):
            if child is not None and child.returncode is not None:
                raise _start_failed(f"the {child.name} process ended with status {child.returncode}", child)

    @property
    def is_alive(self) -> bool:
        """Whether both processes run."""
        return all(child is not None and child.returncode is None for child in (self._head, self._worker))

    def stop(self, *, drain_s: float = 30.0, now: bool = False) -> None:
        """Stop both: the head first, which lets its requests end within `drain_s` seconds, then the node.

        Args:
            now: let nothing end.
        """
        for child in (self._head, self._worker):
            if child is not None:
                self._end(child, 0.0 if now else drain_s)
        self._remove_scratch()

    def _end(self, child: ChildProcess, drain_s: float) -> None:
        child.terminate()
        deadline = time.monotonic() + drain_s
        while not self._hurry.is_set() and time.monotonic() < deadline and not child.wait(POLL_S * 5):
            pass
        if child.wait(AT_ONCE_S):
            return
        child.terminate()
        if not child.wait(STOP_NOW_S):
            child.kill()
            child.wait(STOP_NOW_S)

    def hurry(self) -> None:
        """Cut a `stop` short that runs in another thread, or below a signal handler."""
        self._hurry.set()

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _start_failed(text: str, child: ChildProcess | None) -> StartFailed:
    """The error of a process that ended: its own words where it said some, else its last lines."""
    lines = [line for line in child.tail if line.strip()] if child is not None else []
    told = next((line for line in reversed(lines) if line.lower().startswith(ERROR_PREFIX)), None)
    if told is not None and child is not None:
        return StartFailed(Reason.START_FAILED, f"the {child.name} cannot start: {told[len(ERROR_PREFIX) :]}")
    error = StartFailed(Reason.START_FAILED, f"{text}: {lines[-1].strip()}" if lines else text)
    error.details = tuple(lines[-SHOWN_LINES:])
    return error

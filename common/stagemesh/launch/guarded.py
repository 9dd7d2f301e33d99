"""Run a module so that it never outlives the process that started it.

    python -m stagemesh.launch.guarded PARENT_FD SCRATCH MODULE [ARGUMENT...]

PARENT_FD is the reading end of a pipe whose writing end only the parent has: end of file means that the parent is
gone, however it died. The process is then asked to stop, told to stop at once, and killed. SCRATCH is a folder that is
removed in that case, since the parent no longer can.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
import threading
import time

from stagemesh.launch.parentage import die_with_parent

STOP_NOW_AFTER_S = 1.0
"""Nobody waits for a drain whose starter is gone: the second signal means "at once"."""
KILL_AFTER_S = 10.0
"""For stopping at once: an engine's processes end, files and shared memory are removed."""


def _watch(parent_fd: int, scratch: str) -> None:
    while os.read(parent_fd, 1):
        pass
    shutil.rmtree(scratch, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_NOW_AFTER_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(KILL_AFTER_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Guard this process, then become MODULE."""
    parent_fd, scratch, module, *arguments = sys.argv[1:]
    # The kernel's word reaches also a process whose threads cannot run.
    die_with_parent(signal.SIGTERM)
    threading.Thread(target=_watch, args=(int(parent_fd), scratch), name="parent-watch", daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""A child that does not outlive its parent: the kernel's word, which also reaches a process that hangs."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(death_signal: signal.Signals) -> None:
    """Have the kernel send this process `death_signal` when the thread that spawned it ends. No-op off Linux."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), death_signal)

"""Several gateway processes on one port (SO_REUSEPORT): the kernel spreads clients' connections over them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from stagemesh.addresses import host_and_port
from stagemesh.launch.parentage import die_with_parent


def run_sharing_a_port(
    head: str,
    listen: str,
    count: int,
    drain_timeout_s: float,
    ready_file: Path | None,
    metrics_listen: str | None,
) -> int:
    """Run `count` gateways until they are told to stop; returns the worst exit status.

    Their metrics are on a port each, `metrics_listen` and those after it. Signals are passed on. A process that ends by
    itself takes the others with it: who started this starts it again.
    """
    host, port = host_and_port(listen)
    # Held open, so that a port picked here stays this command's until the processes have it.
    with _reserve(host, port) as placeholder:
        address = f"{host}:{placeholder.getsockname()[1]}"
        command = gateway_command(head, address, drain_timeout_s, "--shares-port")
        children = []
        for number in range(count):
            # One ready file is enough: it says that there is a port to dial.
            own = ["--ready-file", str(ready_file)] if ready_file is not None and number == 0 else []
            if metrics_listen is not None:
                own += ["--metrics-listen", nth_port(metrics_listen, number)]
            children.append(subprocess.Popen([*command, *own], preexec_fn=end_with_parent))
        told = threading.Event()

        def pass_on(number: int, _frame: object) -> None:
            told.set()
            for child in children:
                if child.poll() is None:
                    child.send_signal(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if not told.is_set():
            pass_on(signal.SIGTERM, None)
        return max(abs(child.wait()) for child in children)


def nth_port(address: str, number: int) -> str:
    """The address `number` ports after; port 0, which is any, stays."""
    host, port = host_and_port(address)
    return f"{host}:{port + number if port else 0}"


def _reserve(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    placeholder = socket.socket(family, socket.SOCK_STREAM)
    placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    placeholder.bind((host.strip("[]"), port))
    return placeholder


def gateway_command(head: str, listen: str, drain_timeout_s: float, *further: str) -> list[str]:
    """The command line of a gateway in a process of its own; how to log, it finds in the environment."""
    common = ["--head", head, "--listen", listen, "--drain-timeout", str(drain_timeout_s)]
    return [sys.executable, "-m", "stagemesh.cli.main", "gateway", *common, *further]


def end_with_parent() -> None:
    """For a child, before it becomes a gateway: it drains when its parent dies."""
    die_with_parent(signal.SIGTERM)

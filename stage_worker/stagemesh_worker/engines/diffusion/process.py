"""The engine's end of the child: starting it, its socket, its last lines, its death, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import zmq.asyncio
from zmq.constants import SocketType

from stagemesh_worker.engines.base import DeviceSet
from stagemesh_worker.engines.diffusion.protocol import HIGH_WATER_MARK, Message, ProtocolError, decode, encode
from stagemesh_worker.rundir import run_directory

KEPT_LINES = 30
"""Of the child's output, for the error when it dies."""
STOP_WAIT_S = 5.0
"""For the kernel to end a killed child that holds a device, in seconds."""

_MODULE = "stagemesh_worker.engines.diffusion.child"


class ChildProcess:
    """One child and the socket to it.

    Args:
        on_message: called for each message of the child, on the event loop.
    """

    def __init__(self, devices: DeviceSet, on_message: Callable[[Message], None]) -> None:
        self._devices = devices
        self._on_message = on_message
        self._process: asyncio.subprocess.Process | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket_file = ""
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.ended = asyncio.Event()
        """The child is gone."""

    @property
    def pid(self) -> int | None:
        """Of the child, while there is one."""
        return self._process.pid if self._process is not None else None

    async def start(self, config: Mapping[str, Any]) -> None:
        """Start the child with `config`; it answers with Ready or Failed."""
        path = run_directory() / f"diffusion-{secrets.token_hex(4)}.sock"
        self._socket_file = str(path)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(SocketType.DEALER)
        self._socket.set_hwm(HIGH_WATER_MARK)
        self._socket.bind(f"ipc://{path}")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _MODULE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment(),
        )
        assert self._process.stdin is not None
        full = {
            **config,
            "address": f"ipc://{path}",
            "parent": os.getpid(),
            "cores": list(self._devices.cores),
            "device": self._devices.kind,
        }
        self._process.stdin.write(json.dumps(full).encode() + b"\n")
        self._tasks = [
            asyncio.create_task(self._read_lines(), name="diffusion-lines"),
            asyncio.create_task(self._receive(), name="diffusion-receive"),
            asyncio.create_task(self._watch(), name="diffusion-watch"),
        ]

    async def send(self, message: Message) -> None:
        """Send to the child; waits while it does not read."""
        if self._socket is None:
            raise ConnectionError("the diffusion process is not running")
        await self._socket.send_multipart(encode(message), copy=False)

    def obituary(self) -> str:
        """Why it ended, with its last lines."""
        code = self._process.returncode if self._process is not None else None
        if code is None:
            how = "the diffusion process did not start"
        elif code < 0:
            how = f"the diffusion process was ended by {signal.Signals(-code).name}"
        else:
            how = f"the diffusion process exited with status {code}"
        return "\n".join([how, *self._lines])

    async def stop(self) -> None:
        """End the child and remove its socket; also twice, and after a failed start."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            # There is nothing to save, and a step cannot be interrupted: do not wait for it.
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), STOP_WAIT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None
        if self._socket_file:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._socket_file)

    def _environment(self) -> dict[str, str]:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": os.environ.get("TRANSFORMERS_VERBOSITY", "error"),
            "TQDM_DISABLE": "1",  # progress bars push the lines that matter out of what we keep
        }
        if self._devices.cores:
            environment["OMP_NUM_THREADS"] = str(len(self._devices.cores))
        # Which accelerators it sees, the replica process has set for all that it starts.
        return environment

    async def _read_lines(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # a line without an end beyond the reader's limit: progress bars of a library
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            print(f"[diffusion] {text}", file=sys.stderr, flush=True)

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                message = decode([frame.buffer for frame in frames])
            except ProtocolError as error:
                print(f"[diffusion] {error}", file=sys.stderr, flush=True)
                continue
            self._on_message(message)

    async def _watch(self) -> None:
        assert self._process is not None
        await self._process.wait()
        if not self._stopping:
            # Its last lines may still be in the pipe.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._tasks[0]), 1.0)
        self.ended.set()

"""A stand-in for a replica process that behaves as its stage's name says: `-m misbehaving --control-fd N`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from stagemesh_worker.replica.control import Assign, Failed, Load, Phase, Ready, decode, encode


def main() -> None:
    """Be spawned, read the assignment, misbehave."""
    control = socket.socket(fileno=int(sys.argv[2]))
    reader = control.makefile("rb")
    assign = decode(reader.readline())
    assert isinstance(assign, Assign)
    mood = assign.stage["name"]

    def say(message: object) -> None:
        control.sendall(encode(message))  # type: ignore[arg-type]

    say(Phase("misbehaving"))
    if mood == "orphans":
        # Its child ignores what politeness there is, and holds the output pipe.
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import signal,time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)",
            ]
        )
        print(f"child {child.pid}", flush=True)
        say(Ready("127.0.0.1:1"))
        reader.readline()
        os._exit(7)
    elif mood == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(Ready("127.0.0.1:1"))
        while True:
            say(Load())
            time.sleep(0.1)
    elif mood == "garbage":
        control.sendall(b"this is no message\n")
        reader.read()
        print("the agent is gone, it seems", flush=True)
    elif mood == "chatty":
        print("x" * 100_000)
        print("10%\r50%\r100%", flush=True)
        sys.stdout.write("no newline at the end")
        sys.stdout.flush()
        say(Failed("START_FAILED", "enough said"))
        sys.exit(3)


if __name__ == "__main__":
    main()

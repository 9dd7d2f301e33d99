"""Composition root of the node agent: the loop, the log, the signals."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import uvloop

from stagemesh.telemetry.logs import LogOutput
from stagemesh_worker.node.agent import NodeAgent
from stagemesh_worker.node.settings import AgentSettings

EXIT_S = 5.0
"""An interpreter that does not end by itself after that (a library's thread) is ended."""


def run_worker(settings: AgentSettings, output: LogOutput) -> None:
    """Run a node agent until it is told to stop. Raises as `NodeAgent` and `NodeAgent.run`."""

    async def live() -> None:
        agent = NodeAgent(
            settings,
            lambda stage, replica, line: output.forward(line, component="replica", stage=stage, replica=replica),
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, agent.stop, number.name)
        await agent.run()

    code = 1
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(live())
        code = 0
    finally:
        _exit_in_time(code, output)


def _exit_in_time(code: int, output: LogOutput) -> None:
    def end() -> None:
        output.close()
        os._exit(code)

    timer = threading.Timer(EXIT_S, end)
    timer.daemon = True
    timer.start()

"""Composition root of the node agent: the loop, the log, the signals."""

from __future__ import annotations

import uvloop

from stagemesh_worker.node.agent import AgentSettings, NodeAgent


def run_worker(settings: AgentSettings) -> None:
    """Run a node agent until it is told to stop. Raises as `NodeAgent.run` and `InventoryError`."""
    uvloop.run(_run(settings))


async def _run(settings: AgentSettings) -> None:
    agent = NodeAgent(settings)
    agent.install_signal_handlers()
    await agent.run()



"""The one log line of a request: at INFO when it did not end well, at DEBUG when it did."""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagemesh_head.orchestration.run import RequestRun

log = logging.getLogger(__name__)
GOOD_END = "complete"


def log_end(run: RequestRun) -> None:
    """Say how a request ended, when, and where it had been."""
    outcome = run.stream.outcome
    level = logging.DEBUG if outcome == GOOD_END else logging.INFO
    if not log.isEnabledFor(level):
        return
    places = ", ".join(
        f"{task.name}/{'>'.join(str(replica.replica_id) for replica in task.replicas) or '-'} {task.state.value}"
        for task in run.machine.tasks.values()
    )
    log.log(
        level, "request %s: %s after %.3f s: %s", run.plan.request_id, outcome, monotonic() - run.started_at, places,
        extra={"request_id": run.plan.request_id, "pipeline": run.plan.pipeline.name, "outcome": outcome},
    )  # fmt: skip

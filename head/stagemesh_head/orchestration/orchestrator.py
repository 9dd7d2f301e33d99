"""All requests of a head: opening them, finding them, aborting them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

from stagemesh.config import Pipeline
from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.telemetry.context import NO_TRACE, TraceContext
from stagemesh.telemetry.tracing import Tracer
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh_head.links.release import TensorReleaser
from stagemesh_head.orchestration.envelope import check_envelope, check_prompt
from stagemesh_head.orchestration.events import StopCause
from stagemesh_head.orchestration.expansion import Expander
from stagemesh_head.orchestration.journal import log_end
from stagemesh_head.orchestration.media import check_media
from stagemesh_head.orchestration.pacer import Pacer
from stagemesh_head.orchestration.plan import Planner
from stagemesh_head.orchestration.recovery import RecoveryLimits
from stagemesh_head.orchestration.run import ABORT_TIMEOUT_S, RequestRun, Surroundings
from stagemesh_head.orchestration.tracing import RequestTrace
from stagemesh_head.registry.rows import ReplicaKey
from stagemesh_head.registry.words import pipeline_named
from stagemesh_head.routing.admission import Admission, Place
from stagemesh_head.routing.pools import Pools

log = logging.getLogger(__name__)

PROGRESS_TIMEOUT_S = 600.0
"""A task that says nothing for so long fails its request, whatever its replica says of itself."""
PROGRESS_LOOK_S = 5.0
MAX_ABORT_IDS = 1_000
MAX_ABORT_TIMEOUT_S = 60.0


class Orchestrator:
    """Opens requests and keeps those that run. Also the directory that operators see."""

    def __init__(
        self,
        pipelines: Iterable[Pipeline],
        pools: Pools,
        *,
        recovery: RecoveryLimits | None = None,
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
        tracer: Tracer | None = None,
    ) -> None:
        """Raises ValueError when a pipeline's default sampling parameters or its `prompt_expand` are wrong."""
        self._tracer = tracer
        self._planners = {pipeline.name: Planner(pipeline) for pipeline in pipelines}
        self._expanders = {
            name: Expander(planner.pipeline.stages[0])
            for name, planner in self._planners.items()
            if planner.pipeline.stages[0].prompt_expand is not None
        }
        self.admissions = {
            name: Admission(
                name,
                max_running=planner.pipeline.limits.max_inflight,
                max_waiting=planner.pipeline.limits.max_waiting,
                max_per_client=planner.pipeline.limits.max_per_client,
            )
            for name, planner in self._planners.items()
        }
        self._pools = pools
        self._around = Surroundings(pools, Pacer(), recovery or RecoveryLimits(), TensorReleaser(), self._expanders)
        self.on_ended: Callable[[RequestRun], None] | None = None
        """Called with every request that was admitted and whose stream has its end."""
        self.on_quiet: Callable[[RequestRun], None] | None = None
        """Called with each of these once no replica can be at work for it any more, which may be later."""
        self._runs: dict[str, RequestRun] = {}
        self._places: dict[str, Place] = {}
        self._progress_timeout_s = progress_timeout_s
        self._watch: asyncio.Task[None] | None = None
        self._refuses: MeshError | None = None
        self._idle_waiters: list[asyncio.Future[None]] = []

    def start(self) -> None:
        """Begin to look at the progress of requests. Needs a running event loop."""
        self._watch = asyncio.create_task(self._watch_progress(), name="progress of requests")

    async def stop(self) -> None:
        """Give up what is pending."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        for expander in self._expanders.values():
            expander.close()
        await self._around.releaser.stop()

    async def _watch_progress(self) -> None:
        while True:
            await asyncio.sleep(min(PROGRESS_LOOK_S, self._progress_timeout_s / 4))
            now = monotonic()
            for run in list(self._runs.values()):
                run.check_progress(now, self._progress_timeout_s)

    # -- one request ------------------------------------------------------------
    def open(
        self,
        request: inference_pb.GenerateRequest,
        *,
        time_left_s: float | None = None,
        trace: TraceContext = NO_TRACE,
        is_interactive: bool = False,
        client: str = "",
    ) -> RequestRun:
        """Check a request and start it. The caller empties its stream, and calls `close` in any case.

        Args:
            time_left_s: of the client's call; without one the pipeline's request timeout holds.
            trace: the client's span, which goes on in the stages.
            client: whose bound it counts against; empty: nobody's.

        Raises:
            MeshError: it is not valid, its id is running, or the mesh is at its limit; nothing was submitted.
        """
        if self._tracer is None:
            return self._open(request, time_left_s, trace, is_interactive, client, None)
        spans = RequestTrace(self._tracer, trace, request)
        try:
            recorded = spans if spans.is_recording else None
            return self._open(request, time_left_s, spans.context, is_interactive, client, recorded)
        except MeshError as error:
            spans.refused(error)
            raise

    def _open(
        self,
        request: inference_pb.GenerateRequest,
        time_left_s: float | None,
        trace: TraceContext,
        is_interactive: bool,
        client: str,
        spans: RequestTrace | None,
    ) -> RequestRun:
        if self._refuses is not None:
            raise self._refuses
        planner = self._planner(request.pipeline)
        if spans is not None:
            spans.pipeline = planner.pipeline.name
        check_envelope(request, planner.pipeline)
        if request.request_id in self._runs:
            raise MeshError(
                Reason.DUPLICATE_REQUEST,
                f"request_id: {request.request_id!r}: a request with this id is still running",
                request_id=request.request_id,
            )
        plan = planner.plan(request, trace, is_interactive=is_interactive)
        left = planner.pipeline.limits.request_timeout if time_left_s is None else time_left_s
        deadline = None if left is None else monotonic() + left
        run = RequestRun(plan, self._around, deadline=deadline, ended=self._ended, quiet=self._is_quiet, trace=spans)
        try:
            place = self.admissions[planner.pipeline.name].enter(run.start, client)
        except MeshError:
            run.discard()
            raise
        self._runs[plan.request_id], self._places[plan.request_id] = run, place
        if place.has_turn:
            run.start()
        return run

    def append(
        self, run: RequestRun, prompt: prompt_pb.Prompt, params: sampling_pb.SamplingParams | None = None
    ) -> None:
        """Give an interactive request its next chunk.

        Raises:
            MeshError: INVALID_REQUEST or PROMPT_TOO_LARGE, naming the field.
        """
        first = run.plan.stages[0].stage
        check_prompt(prompt, first, "append")
        check_media(prompt, [first], "append")
        if params is not None:
            params = self._planner(run.plan.pipeline.name).chunk_params(run.plan, params)
        run.append(prompt, params, is_last=False)

    def close(self, run: RequestRun) -> None:
        """The client's call is over: whatever still runs of the request is stopped."""
        run.stop(StopCause.CLIENT_LEFT)

    def _ended(self, run: RequestRun) -> None:
        if self.on_ended is not None:
            self.on_ended(run)
        log_end(run)
        del self._runs[run.plan.request_id]
        self._places.pop(run.plan.request_id).leave()
        if not self._runs:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle_waiters.clear()

    def _is_quiet(self, run: RequestRun) -> None:
        if self.on_quiet is not None:
            self.on_quiet(run)

    def _planner(self, name: str) -> Planner:
        return self._planners[pipeline_named(name, self._planners)]

    # -- aborts -----------------------------------------------------------------
    async def abort(self, request_ids: Sequence[str], timeout_s: float | None) -> list[inference_pb.AbortResult]:
        """Stop requests; returns when every stage confirmed, or at the timeout, in the order asked.

        Raises:
            MeshError: INVALID_REQUEST, too few or too many ids, or a timeout out of range.
        """
        if not 1 <= len(request_ids) <= MAX_ABORT_IDS:
            raise invalid("request_ids", len(request_ids), f"give 1 to {MAX_ABORT_IDS} ids")
        timeout = ABORT_TIMEOUT_S if timeout_s is None else timeout_s
        if not 0 < timeout <= MAX_ABORT_TIMEOUT_S:
            raise invalid("timeout", timeout, f"must be above 0 and at most {MAX_ABORT_TIMEOUT_S:g} seconds")
        runs = {name: run for name in request_ids if (run := self._runs.get(name)) is not None}
        for run in runs.values():
            run.stop(StopCause.ASKED, timeout=timeout)
        waits = [asyncio.ensure_future(run.quiet()) for run in runs.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout)
            for wait in late:
                wait.cancel()
        return [_abort_result(name, runs.get(name)) for name in request_ids]

    # -- for operators ------------------------------------------------------------
    def requests(self, pipeline: str) -> Iterable[admin_pb.RequestInfo]:
        """Requests in flight of a pipeline (empty: all), oldest first."""
        return [run.describe() for run in self._runs.values() if pipeline in ("", run.plan.pipeline.name)]

    def inflight(self, key: ReplicaKey) -> int:
        """Tasks that this head has bound to a replica now."""
        members = self._pools.of(key.pipeline, key.stage).members()
        return next((member.inflight for member in members if member.replica_id == key.replica_id), 0)

    @property
    def running(self) -> int:
        """Requests in flight."""
        return len(self._runs)

    # -- the end --------------------------------------------------------------
    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, let those in flight finish, stop the rest; returns how many were stopped."""
        self._refuses = MeshError(Reason.DRAINING, "the head is stopping and takes no new requests")
        if self._runs:
            waiter = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(waiter)
            await asyncio.wait([waiter], timeout=timeout_s)
        left = list(self._runs.values())
        for run in left:
            run.stop(StopCause.FAILED, MeshError(Reason.DRAINING, "the head stopped before the request was done"))
        return len(left)


def _abort_result(request_id: str, run: RequestRun | None) -> inference_pb.AbortResult:
    if run is None:
        return inference_pb.AbortResult(request_id=request_id, outcome=inference_pb.ABORT_OUTCOME_UNKNOWN)
    late = run.machine.unconfirmed
    outcome = inference_pb.ABORT_OUTCOME_UNCONFIRMED if late else inference_pb.ABORT_OUTCOME_ABORTED
    return inference_pb.AbortResult(request_id=request_id, outcome=outcome, unconfirmed_stages=late)

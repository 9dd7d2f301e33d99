"""AdminService: what operators see and order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf import json_format

from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.v1 import admin_pb2 as admin_pb
from stagemesh.v1 import admin_pb2_grpc as admin_rpc
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh_head.registry import views
from stagemesh_head.registry.registry import Registry
from stagemesh_head.registry.rows import ReplicaKey
from stagemesh_head.registry.state import Replica
from stagemesh_head.services.answers import Answers
from stagemesh_head.services.paging import page_of
from stagemesh_head.services.protocols import RequestDirectory, StageCaller

DEFAULT_CALL_TIMEOUT_S = 30.0
MAX_CALL_TIMEOUT_S = 3_600.0
MAX_WATCHERS = 1_000
_Response = TypeVar("_Response")
_Context = grpc.aio.ServicerContext[Any, Any]


async def _answer(context: _Context, work: Callable[[], _Response]) -> _Response:
    """The result of `work`, or the end of the call with its error."""
    try:
        return work()
    except MeshError as error:
        await error.abort(context)


class AdminServicer(admin_rpc.AdminServiceServicer):
    """Parses, calls, maps errors."""

    def __init__(self, registry: Registry, requests: RequestDirectory, caller: StageCaller) -> None:
        self._registry = registry
        self._machine = registry.machine
        self._requests = requests
        self._caller = caller
        self._answers = Answers(registry.clock)
        self._watchers = 0

    # -- lists --------------------------------------------------------------
    async def ListNodes(self, request: admin_pb.ListNodesRequest, context: _Context) -> admin_pb.ListNodesResponse:
        """Nodes by id, also those that are gone and not yet forgotten."""
        return await _answer(context, lambda: self._list_nodes(request))

    def _list_nodes(self, request: admin_pb.ListNodesRequest) -> admin_pb.ListNodesResponse:
        state, now = self._machine.state, self._registry.clock()
        page, token = page_of(state.nodes.items(), lambda item: [item[0]], request.page_size, request.page_token)
        return admin_pb.ListNodesResponse(
            header=self._registry.header(),
            nodes=[views.node_info(node, state, now) for _, node in page],
            next_page_token=token,
        )

    async def ListReplicas(
        self, request: admin_pb.ListReplicasRequest, context: _Context
    ) -> admin_pb.ListReplicasResponse:
        """Replicas by pipeline, stage and id; what is missing comes with the first page."""
        return await _answer(context, lambda: self._list_replicas(request))

    def _list_replicas(self, request: admin_pb.ListReplicasRequest) -> admin_pb.ListReplicasResponse:
        registry, state, now = self._registry, self._machine.state, self._registry.clock()
        if request.pipeline or request.stage:
            pipeline = self._machine.pipeline_of(request.pipeline)
            if request.stage:
                self._machine.entry_of(pipeline, request.stage)

        def is_wanted(pipeline: str, stage: str) -> bool:
            return request.pipeline in ("", pipeline) and request.stage in ("", stage)

        rows: list[tuple[ReplicaKey, str, Replica | registry_pb.ReplicaStatus]] = [
            (key, replica.incarnation, replica)
            for key, replica in state.replicas.items()
            if is_wanted(key.pipeline, key.stage)
        ]
        rows += [
            (key, status.report.replica.incarnation, status)
            for key, status in views.gone_views(state)
            if request.include_gone and is_wanted(key.pipeline, key.stage)
        ]
        page, token = page_of(
            rows,
            lambda item: [item[0].pipeline, item[0].stage, item[0].replica_id, item[1]],
            request.page_size,
            request.page_token,
        )
        missing = [] if request.page_token else self._registry.missing()
        return admin_pb.ListReplicasResponse(
            header=registry.header(),
            replicas=[
                views.replica_view(row, state, now, self._requests.inflight) if isinstance(row, Replica) else row
                for _, _, row in page
            ],
            missing=[slot for slot in missing if is_wanted(slot.replica.pipeline, slot.replica.stage)],
            next_page_token=token,
        )

    async def ListRequests(
        self, request: admin_pb.ListRequestsRequest, context: _Context
    ) -> admin_pb.ListRequestsResponse:
        """Requests in flight, oldest first."""
        return await _answer(context, lambda: self._list_requests(request))

    def _list_requests(self, request: admin_pb.ListRequestsRequest) -> admin_pb.ListRequestsResponse:
        if request.pipeline:
            self._machine.pipeline_of(request.pipeline)
        # Arrival does not change while a request runs; an age does, so the key is the moment of arrival.
        now = self._registry.clock()
        page, token = page_of(
            self._requests.requests(request.pipeline),
            lambda info: [round(now - info.age.ToNanoseconds() / 1e9, 3), info.request_id],
            request.page_size,
            request.page_token,
        )
        return admin_pb.ListRequestsResponse(header=self._registry.header(), requests=page, next_page_token=token)

    # -- orders -------------------------------------------------------------
    async def DrainReplica(
        self, request: admin_pb.DrainReplicaRequest, context: _Context
    ) -> admin_pb.DrainReplicaResponse:
        """Begin to drain a replica."""
        return await _answer(context, lambda: self._answers.once(request, self._drain_replica))

    def _drain_replica(self, request: admin_pb.DrainReplicaRequest) -> admin_pb.DrainReplicaResponse:
        registry, now = self._registry, self._registry.clock()
        ref = request.replica
        key = ReplicaKey(self._machine.pipeline_of(ref.pipeline), ref.stage, ref.replica_id)
        before = self._machine.state.replicas.get(key)
        registry.apply(
            self._machine.drain_replica(key, ref.incarnation, self._grace(request), request.reason[:1_000], now)
        )
        assert before is not None
        replica = self._machine.state.replicas.get(key)
        if replica is before:
            status = views.replica_view(replica, self._machine.state, now, self._requests.inflight)
        else:
            # It had nothing to finish and went at once.
            status = self._machine.state.gone[key, before.incarnation].status
        return admin_pb.DrainReplicaResponse(header=registry.header(), replica=status)

    async def DrainNode(self, request: admin_pb.DrainNodeRequest, context: _Context) -> admin_pb.DrainNodeResponse:
        """Begin to drain a node."""
        return await _answer(context, lambda: self._answers.once(request, self._drain_node))

    def _drain_node(self, request: admin_pb.DrainNodeRequest) -> admin_pb.DrainNodeResponse:
        registry, now = self._registry, self._registry.clock()
        registry.apply(self._machine.drain_node(request.node_id, self._grace(request), request.reason[:1_000], now))
        state = self._machine.state
        node = views.node_info(state.nodes[request.node_id], state, now)
        return admin_pb.DrainNodeResponse(header=registry.header(), node=node)

    async def ScaleStage(self, request: admin_pb.ScaleStageRequest, context: _Context) -> admin_pb.ScaleStageResponse:
        """Set a stage's target."""
        return await _answer(context, lambda: self._answers.once(request, self._scale_stage))

    def _scale_stage(self, request: admin_pb.ScaleStageRequest) -> admin_pb.ScaleStageResponse:
        previous, effects = self._machine.scale_stage(
            request.pipeline, request.stage, request.replicas, self._registry.clock()
        )
        self._registry.apply(effects)
        pipeline = self._machine.pipeline_of(request.pipeline)
        return admin_pb.ScaleStageResponse(
            header=self._registry.header(),
            previous_replicas=previous,
            replicas=request.replicas,
            missing=[
                slot
                for slot in self._registry.missing()
                if (slot.replica.pipeline, slot.replica.stage) == (pipeline, request.stage)
            ],
        )

    # -- calls and events ---------------------------------------------------
    async def CallStages(self, request: admin_pb.CallStagesRequest, context: _Context) -> admin_pb.CallStagesResponse:
        """Run a control method on all replicas of the stages."""
        try:
            pipeline = self._machine.pipeline_of(request.pipeline)
            stages = list(dict.fromkeys(request.stages)) or [
                key.stage for key in self._machine.state.stages if key.pipeline == pipeline
            ]
            for stage in stages:
                self._machine.entry_of(pipeline, stage)
            if not request.method:
                raise invalid("method", "", "must name a control method, such as 'check_health'")
            timeout_s = _seconds(request, "timeout", DEFAULT_CALL_TIMEOUT_S)
            if not 0 < timeout_s <= MAX_CALL_TIMEOUT_S:
                raise invalid("timeout", f"{timeout_s:g}s", f"must be above 0 s and at most {MAX_CALL_TIMEOUT_S:g} s")
            remaining = context.time_remaining()
            results = await self._caller.call(
                pipeline,
                stages,
                request.method,
                json_format.MessageToDict(request.args),  # type: ignore[arg-type]
                json_format.MessageToDict(request.kwargs),
                min(timeout_s, remaining) if remaining is not None else timeout_s,
            )
        except MeshError as error:
            await error.abort(context)
        return admin_pb.CallStagesResponse(header=self._registry.header(), results=results)

    async def WatchEvents(
        self, request: admin_pb.WatchEventsRequest, context: _Context
    ) -> AsyncIterator[admin_pb.WatchEventsResponse]:
        """Events as they happen."""
        if self._watchers >= MAX_WATCHERS:
            await MeshError(Reason.OVERLOADED, f"{MAX_WATCHERS} watches are open already").abort(context)
        self._watchers += 1
        try:
            # The caller learns that the watch has begun, though nothing may happen for long.
            await context.send_initial_metadata(())
            async for event in self._registry.events.watch(request.after_number, include_past=request.include_past):
                yield admin_pb.WatchEventsResponse(header=self._registry.header(), event=event)
        except MeshError as error:
            await error.abort(context)
        finally:
            self._watchers -= 1

    # -- inside -------------------------------------------------------------
    def _grace(self, request: Any) -> float:
        return _seconds(request, "grace", self._registry.settings.drain_grace_s)


def _seconds(request: Any, field: str, default: float) -> float:
    """A Duration field in seconds."""
    if not request.HasField(field):
        return default
    return float(getattr(request, field).ToNanoseconds() / 1e9)

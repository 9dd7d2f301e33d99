"""RegistryService: sessions of nodes, and followers of the replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.v1 import registry_pb2 as registry_pb
from stagemesh.v1 import registry_pb2_grpc as registry_rpc
from stagemesh_head.registry import views
from stagemesh_head.registry.changes import Delta
from stagemesh_head.registry.registry import Registry
from stagemesh_head.registry.session import Session

log = logging.getLogger(__name__)

MAX_WATCHERS = 1_000
END_OR_BREAK_S = 0.25
"""How long a session's end is looked at before it counts as meant."""


class RegistryServicer(registry_rpc.RegistryServiceServicer):
    """Parses, calls the registry, maps errors."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._watchers = 0
        self._made: tuple[Delta, str, registry_pb.WatchReplicasResponse] | None = None
        """The message made last, for which delta and pipeline."""

    async def Join(  # type: ignore[override]  # it writes to the context while a task reads
        self,
        request_iterator: AsyncIterator[registry_pb.JoinRequest],
        context: grpc.aio.ServicerContext[registry_pb.JoinRequest, registry_pb.JoinResponse],
    ) -> None:
        """A node's session."""
        try:
            session = self._registry.open_session(context.peer())
        except MeshError as error:
            await error.abort(context)
        reader = asyncio.create_task(self._read(session, request_iterator), name=f"read session {session.number}")
        try:
            while (message := await session.next()) is not None:
                await context.write(message)
        except asyncio.CancelledError:
            self._registry.session_ended(session, "its session broke", on_purpose=False)
            raise
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._registry.session_ended(session, "its session ended", on_purpose=False)
        if session.error is not None:
            await session.error.abort(context)

    async def _read(self, session: Session, requests: AsyncIterator[registry_pb.JoinRequest]) -> None:
        """Feed the registry until the node's side ends; whatever one message does, other sessions go on."""
        try:
            await self._read_messages(session, requests)
        except MeshError as error:
            session.close(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("session %d with %s failed", session.number, session.peer)
            session.close(MeshError.from_exception(error))

    async def _read_messages(self, session: Session, requests: AsyncIterator[registry_pb.JoinRequest]) -> None:
        iterator = aiter(requests)
        timeout = self._registry.settings.hello_timeout_s
        try:
            first = await asyncio.wait_for(anext(iterator), timeout)
        except TimeoutError:
            raise MeshError(Reason.INVALID_REQUEST, f"no hello within {timeout:g} s") from None
        except StopAsyncIteration:
            session.close(None)
            return
        if not first.HasField("hello"):
            kind = first.WhichOneof("message")
            if kind == "heartbeat":
                raise MeshError(Reason.NODE_UNKNOWN, "a session begins with hello: join again")
            raise MeshError(Reason.INVALID_REQUEST, f"message: {kind or 'nothing'}: a session begins with hello")
        self._registry.receive(session, first)
        async for message in iterator:
            self._registry.receive(session, message)
        # A call that broke ends the same way, and is cancelled a moment later; so is this task, then.
        await asyncio.sleep(END_OR_BREAK_S)
        self._registry.session_ended(session, "it ended its session", on_purpose=True)

    async def WatchReplicas(
        self,
        request: registry_pb.WatchReplicasRequest,
        context: grpc.aio.ServicerContext[registry_pb.WatchReplicasRequest, registry_pb.WatchReplicasResponse],
    ) -> AsyncIterator[registry_pb.WatchReplicasResponse]:
        """A snapshot, then every change."""
        if self._watchers >= MAX_WATCHERS:
            await MeshError(Reason.OVERLOADED, f"{MAX_WATCHERS} watches are open already").abort(context)
        self._watchers += 1
        try:
            async for response in self._watch(request):
                yield response
        except MeshError as error:
            await error.abort(context)
        finally:
            self._watchers -= 1

    async def _watch(
        self, request: registry_pb.WatchReplicasRequest
    ) -> AsyncIterator[registry_pb.WatchReplicasResponse]:
        registry, pipeline = self._registry, request.pipeline
        if pipeline:
            registry.machine.pipeline_of(pipeline)
        revision = request.after_revision
        if revision == 0:
            revision = registry.changes.revision
            yield self._snapshot(pipeline)
        elif not request.head_epoch:
            raise invalid("head_epoch", "", "must be given with after_revision")
        elif request.head_epoch != registry.head_epoch:
            raise MeshError(
                Reason.REVISION_TOO_OLD,
                f"epoch {request.head_epoch!r} is over, this is {registry.head_epoch!r}: start with a snapshot",
            )
        else:
            registry.changes.check(revision)
        async for delta in registry.changes.follow(revision):
            response = self._response(delta, pipeline)
            if response.replicas or response.removed:
                yield response

    def _response(self, delta: Delta, pipeline: str) -> registry_pb.WatchReplicasResponse:
        """A delta as a message. It is made once for all followers that get it."""
        if self._made is None or self._made[0] is not delta or self._made[1] != pipeline:
            registry = self._registry
            state, now = registry.machine.state, registry.clock()
            response = registry_pb.WatchReplicasResponse(
                header=registry.header(delta.revision),
                replicas=[
                    views.replica_view(state.replicas[key], state, now, None)
                    for key in delta.changed
                    if pipeline in ("", key.pipeline)
                ],
                removed=[
                    key.ref(incarnation)
                    for key, incarnation in delta.removed
                    if pipeline in ("", key.pipeline)
                ],
            )
            self._made = (delta, pipeline, response)
        return self._made[2]

    def _snapshot(self, pipeline: str) -> registry_pb.WatchReplicasResponse:
        registry = self._registry
        state, now = registry.machine.state, registry.clock()
        return registry_pb.WatchReplicasResponse(
            header=registry.header(),
            snapshot=True,
            replicas=[
                views.replica_view(replica, state, now, None)
                for key, replica in sorted(state.replicas.items())
                if pipeline in ("", key.pipeline)
            ],
            pipelines_json=[p.model_dump_json() for p in registry.pipelines if pipeline in ("", p.name)],
        )

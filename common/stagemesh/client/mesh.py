"""`Mesh` and `AsyncMesh`: a whole mesh on this machine, for as long as a program wants it.

    with stagemesh.Mesh("pipeline.yaml") as mesh:
        for frame in mesh.generate("a red circle on a blue background"):
            ...

Head, node agent and replicas are processes of their own. None outlives the program, also when that is killed.
Needs the packages of head and worker (`pip install 'stagemesh[head,llm-cpu,diffusion]'`).
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

from stagemesh.client.admin import AdminClient, ReplicaCall
from stagemesh.client.aio import AsyncClient
from stagemesh.client.errors import NotFound, RequestTimeout, StageMeshError, Unreachable
from stagemesh.client.frames import Frame, Reference
from stagemesh.client.pipelines import AbortResult, PipelineInfo, StageInfo
from stagemesh.client.prompts import PromptLike
from stagemesh.client.requests import RequestOptions
from stagemesh.client.sampling import SamplingByStage
from stagemesh.client.sync import Client
from stagemesh.launch.local import LocalMesh
from stagemesh.launch.readiness import Readiness, look
from stagemesh.rpc.errors import Reason

POLL_S = 0.1
START_TIMEOUT_S = 600.0

_log = logging.getLogger("stagemesh.mesh")


class _Embedded:
    """Starts the processes and waits until they serve; what both faces share."""

    def __init__(
        self,
        pipeline: str | Path,
        *,
        stages: Sequence[str] = (),
        stage_overrides: Mapping[str, Mapping[str, Any]] | None = None,
        head_arguments: Sequence[str] = (),
        worker_arguments: Sequence[str] = (),
        start_timeout: float = START_TIMEOUT_S,
        drain_timeout: float = 30.0,
        listen: str = "127.0.0.1:0",
    ) -> None:
        """Nothing is started before the `with` block, or `start()`.

        Args:
            pipeline: the pipeline file.
            stages: stages to run here, by name or id; empty: all. The others wait for nodes that join `address`.
            stage_overrides: values over those of the file, by stage.
            head_arguments: further arguments of `stagemesh head`.
            worker_arguments: further arguments of `stagemesh worker`.
            start_timeout: seconds until all replicas must be ready.
            drain_timeout: seconds that running requests have at the end.
            listen: host:port of the head; port 0 picks one.
        """
        head = [str(pipeline), "--listen", listen]
        if stage_overrides:
            head += ["--stage-overrides", json.dumps(stage_overrides)]
        self._local = LocalMesh(
            [*head, *head_arguments], worker_arguments, stages=[str(stage) for stage in stages], on_line=_log_line
        )
        self._start_timeout = start_timeout
        self._drain_timeout = drain_timeout

    @property
    def address(self) -> str:
        """host:port of the head, once started."""
        return self._local.address

    def is_alive(self) -> bool:
        """Whether head and node agent run. Single replicas may still be down: see `get_pipeline().problems`."""
        return self._local.is_alive

    def _start(self) -> None:
        atexit.register(self._local.stop, now=True)
        try:
            self._local.start()
            self._await_ready()
        except BaseException:
            self._stop(now=True)
            raise

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        last: Readiness | None = None
        with Client(self.address, max_retries=0) as client, AdminClient(self.address) as admin:
            while time.monotonic() < deadline:
                self._local.check()
                try:
                    last = look(client, admin)
                except Unreachable:
                    pass  # check() says more, if it is gone
                else:
                    if last.failures:
                        raise last.failures[0]
                    if last.is_ready:
                        return
                time.sleep(POLL_S)
        waiting = [slot for slot in last.slots if slot.state != "ready"] if last else []
        what = "; ".join(f"{slot.stage}/{slot.replica_id}: {slot.state} {slot.detail}".strip() for slot in waiting)
        raise RequestTimeout(
            Reason.REQUEST_TIMEOUT, f"the mesh is not ready after {self._start_timeout:g} s: {what or 'no answer'}"
        )

    def _stop(self, *, now: bool = False) -> None:
        self._local.stop(drain_s=self._drain_timeout, now=now)
        atexit.unregister(self._local.stop)


def _stage(pipeline: PipelineInfo, name: str) -> StageInfo:
    stage = pipeline.stage(name)
    if stage is None:
        names = ", ".join(stage.name for stage in pipeline.stages)
        raise NotFound(Reason.UNKNOWN_STAGE, f"pipeline {pipeline.name!r} has no stage {name!r}; it has {names}")
    return stage


def _log_line(name: str, line: str) -> None:
    _log.debug("[%s] %s", name, line)


class Mesh(_Embedded):
    """A mesh on this machine, synchronously. Arguments are explained at its base."""

    _client: Client | None = None

    def start(self) -> Self:
        """Start everything and wait until all replicas are ready.

        Raises:
            StartFailed: with the stage's own error; nothing is left running.
        """
        self._start()
        self._client = Client(self.address)
        return self

    def shutdown(self) -> None:
        """Let running requests end within the drain timeout, and stop everything. Twice is once."""
        if self._client is not None:
            self._stop()
            self._client.close()
            self._client = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def client(self) -> Client:
        """The client that speaks to this mesh."""
        if self._client is None:
            raise StageMeshError(Reason.UNREACHABLE, "the mesh is not started: use `with Mesh(...)`, or start()")
        return self._client

    def generate(
        self,
        prompt: PromptLike,
        *,
        sampling: SamplingByStage | None = None,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Frame]:
        """As `Client.generate`."""
        return self.client.generate(prompt, sampling=sampling, timeout=timeout, **options)

    def fetch(self, reference: Reference, *, timeout: float | None = None) -> Frame:
        """As `Client.fetch`."""
        return self.client.fetch(reference, timeout=timeout)

    def abort(self, *request_ids: str, timeout: float = 2.0) -> list[AbortResult]:
        """As `Client.abort`."""
        return self.client.abort(*request_ids, timeout=timeout)

    def get_pipeline(self, name: str = "") -> PipelineInfo:
        """A pipeline, with what keeps it from serving."""
        return self.client.get_pipeline(name)

    def get_stage_metadata(self, stage: str, *, pipeline: str = "") -> StageInfo:
        """A stage's type, output kind, default sampling parameters, tasks and limits. Raises NotFound."""
        return _stage(self.get_pipeline(pipeline), stage)

    def collective_call(
        self,
        method: str,
        *args: Any,
        stages: Sequence[str] = (),
        timeout: float = 30.0,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[ReplicaCall]:
        """Run a control method, such as "sleep", on every replica of `stages` (empty: all); one answer a replica."""
        with AdminClient(self.client.address) as admin:
            return admin.call_stages(method, *args, stages=stages, timeout_s=timeout, kwargs=kwargs)


class AsyncMesh(_Embedded):
    """A mesh on this machine, for programs with an event loop. Arguments are explained at its base."""

    _client: AsyncClient | None = None

    async def start(self) -> Self:
        """As `Mesh.start`."""
        starting = asyncio.ensure_future(asyncio.to_thread(self._start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread cannot be cancelled; once its processes are stopped, its waiting ends with an error.
            await asyncio.to_thread(self._stop, now=True)
            await asyncio.gather(starting, return_exceptions=True)
            raise
        self._client = AsyncClient(self.address)
        return self

    async def shutdown(self) -> None:
        """As `Mesh.shutdown`."""
        if self._client is not None:
            client, self._client = self._client, None
            await asyncio.to_thread(self._stop)
            await client.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    @property
    def client(self) -> AsyncClient:
        """The client that speaks to this mesh."""
        if self._client is None:
            raise StageMeshError(
                Reason.UNREACHABLE, "the mesh is not started: use `async with AsyncMesh(...)`, or start()"
            )
        return self._client

    def generate(
        self,
        prompt: PromptLike,
        *,
        sampling: SamplingByStage | None = None,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[Frame]:
        """As `AsyncClient.generate`."""
        return self.client.generate(prompt, sampling=sampling, timeout=timeout, **options)

    async def fetch(self, reference: Reference, *, timeout: float | None = None) -> Frame:
        """As `AsyncClient.fetch`."""
        return await self.client.fetch(reference, timeout=timeout)

    async def abort(self, *request_ids: str, timeout: float = 2.0) -> list[AbortResult]:
        """As `AsyncClient.abort`."""
        return await self.client.abort(*request_ids, timeout=timeout)

    async def get_pipeline(self, name: str = "") -> PipelineInfo:
        """As `Mesh.get_pipeline`."""
        return await self.client.get_pipeline(name)

    async def get_stage_metadata(self, stage: str, *, pipeline: str = "") -> StageInfo:
        """As `Mesh.get_stage_metadata`."""
        return _stage(await self.get_pipeline(pipeline), stage)

    async def collective_call(
        self,
        method: str,
        *args: Any,
        stages: Sequence[str] = (),
        timeout: float = 30.0,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[ReplicaCall]:
        """As `Mesh.collective_call`."""

        def call() -> list[ReplicaCall]:
            with AdminClient(self.address) as admin:
                return admin.call_stages(method, *args, stages=stages, timeout_s=timeout, kwargs=kwargs)

        return await asyncio.to_thread(call)

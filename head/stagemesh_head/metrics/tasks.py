"""Counts tasks, a request's visits to its stages, once no replica is at work for the request any more."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from stagemesh.references import size_of
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh_head.metrics.buckets import BYTES, PIXELS, SECONDS, STEPS
from stagemesh_head.orchestration.run import RequestRun
from stagemesh_head.orchestration.task import Task, TaskState
from stagemesh_head.registry.rows import Membership, ReplicaKey, ReplicaRow

log = logging.getLogger(__name__)

STAGE = ("pipeline", "stage")
EDGE = ("pipeline", "source", "stage")
REPLICA = ("pipeline", "stage", "replica")


class TaskMetrics:
    """Where tasks' time went, and what they made. Series of a replica go with its slot."""

    def __init__(self, registry: CollectorRegistry, membership: Membership) -> None:
        def histogram(name: str, text: str, labels: Sequence[str], buckets: Sequence[float] = SECONDS) -> Histogram:
            return Histogram(f"stagemesh_{name}", text, labels, buckets=buckets, registry=registry)

        def counter(name: str, text: str, labels: Sequence[str] = STAGE) -> Counter:
            return Counter(f"stagemesh_{name}", text, labels, registry=registry)

        self._queue = histogram("queue_seconds", "Wait of a task for a replica.", STAGE)
        self._first = histogram(
            "first_output_seconds", "From a task's submission to its first output.", (*STAGE, "modality")
        )
        self._stage = histogram("stage_seconds", "From a task's submission to its end.", STAGE)
        self._abort = histogram("abort_seconds", "From a task's abort until its replica let go of it.", STAGE)
        self._engine_queue = histogram("engine_queue_seconds", "Wait of a task inside its replica.", REPLICA)
        self._generation = histogram("generation_seconds", "From the engine's begin with a task to its end.", REPLICA)
        self._transfer = histogram("transfer_seconds", "Bringing a task the output of a stage before.", EDGE)
        self._edge_bytes = histogram("transfer_bytes", "Size of what was brought.", EDGE, BYTES)
        self._output_bytes = histogram("output_bytes", "Size of a task's files, sound and tensors.", STAGE, BYTES)
        self._pixels = histogram("image_pixels", "Pixels of a picture.", STAGE, PIXELS)
        self._steps = histogram("task_diffusion_steps", "Denoising steps of a task.", STAGE, STEPS)
        self._work = {
            "prompt_tokens": counter("prompt_tokens", "Tokens of prompts."),
            "completion_tokens": counter("generation_tokens", "Tokens generated."),
            "diffusion_steps": counter("diffusion_steps", "Denoising steps made."),
            "images": counter("images", "Pictures made."),
            "audio_seconds": counter("audio_seconds", "Seconds of sound made."),
        }
        """By field of a task's usage."""
        self._retries = counter("task_retries", "Attempts of tasks after a loss.")
        self._recoveries = counter("recoveries", "Tasks that survived a loss, by how.", (*STAGE, "mode"))
        self._replicas = {row.key for row in membership.rows()}
        membership.subscribe(self._row_changed)

    def _row_changed(self, key: ReplicaKey, row: ReplicaRow | None) -> None:
        if row is not None:
            self._replicas.add(key)
            return
        self._replicas.discard(key)
        for family in (self._engine_queue, self._generation):
            with contextlib.suppress(KeyError):
                family.remove(key.pipeline, key.stage, str(key.replica_id))

    def request_quiet(self, run: RequestRun) -> None:
        """Count what became of a request's tasks. An error in here costs numbers and no request."""
        pipeline = run.plan.pipeline.name
        stages = {planned.stage.name for planned in run.plan.stages}
        try:
            for task in run.machine.tasks.values():
                if task.attempt > 1:
                    self._retries.labels(pipeline, task.stage_name).inc(task.attempt - 1)
                if task.replicas:
                    self._times(pipeline, task)
                if task.finished is not None:
                    self._made(pipeline, task, task.finished, stages)
        except Exception:
            log.exception("request %s is not counted as it should be", run.plan.request_id)

    def _times(self, pipeline: str, task: Task) -> None:
        names, times, last = (pipeline, task.stage_name), task.times, task.replicas[-1]
        self._queue.labels(*names).observe(times.queue_s)
        if times.first_output_at:
            modality = task.planned.stage.final_output_type
            self._first.labels(*names, modality).observe(times.first_output_at - times.submitted_at)
        if times.abort_s is not None:
            self._abort.labels(*names).observe(times.abort_s)
        if task.recovery:
            self._recoveries.labels(*names, task.recovery).inc()
        if times.began_at and ReplicaKey.of(last) in self._replicas:
            replica = (*names, str(last.replica_id))
            self._engine_queue.labels(*replica).observe(times.last_engine_queue_s)
            if task.state is TaskState.DONE:
                self._generation.labels(*replica).observe(times.done_at - times.began_at)

    def _made(self, pipeline: str, task: Task, finished: frame_pb.StageFinished, stages: Collection[str]) -> None:
        names = (pipeline, task.stage_name)
        self._stage.labels(*names).observe(finished.timings.total.ToNanoseconds() / 1e9)
        for field, total in self._work.items():
            if amount := getattr(finished.usage, field):
                total.labels(*names).inc(amount)
        if finished.usage.diffusion_steps:
            self._steps.labels(*names).observe(finished.usage.diffusion_steps)
        for moved in finished.transfers:
            if moved.source in stages:  # no replica makes labels up
                edge = (pipeline, moved.source, task.stage_name)
                self._transfer.labels(*edge).observe(moved.duration.ToNanoseconds() / 1e9)
                self._edge_bytes.labels(*edge).observe(moved.size_bytes)
        pieces = task.output.pieces
        if pieces:
            self._output_bytes.labels(*names).observe(sum(size_of(piece) for piece in pieces))
        for piece in pieces:
            if pixels := piece.media.width * piece.media.height:
                self._pixels.labels(*names).observe(pixels)

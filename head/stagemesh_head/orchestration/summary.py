"""What a stage and a request say at their end: usage, timings, replicas, recovery."""

from __future__ import annotations

from collections.abc import Sequence

from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.wire import duration
from stagemesh_head.orchestration.pair import public
from stagemesh_head.orchestration.task import Task

_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "diffusion_steps", "images", "audio_seconds")


def complete(task: Task, finished: frame_pb.StageFinished, now: float) -> frame_pb.StageFinished:
    """Add to a replica's last word what only the head knows."""
    times = task.times
    finished.recovery = task.recovery
    del finished.replicas[:]
    finished.replicas.extend(task.replicas)
    timings = finished.timings
    timings.queue.CopyFrom(duration(times.queue_s))
    timings.engine_queue.CopyFrom(duration(times.engine_queue_s))
    timings.transfer.CopyFrom(duration(times.transfer_s))
    if times.submitted_at:
        timings.first_output.CopyFrom(duration((times.first_output_at or now) - times.submitted_at))
        timings.total.CopyFrom(duration(now - times.submitted_at))
    if task.recovery and task.output.token_ids and not task.output.deltas:
        # The last replica counted the replayed tokens as prompt, or not at all.
        finished.usage.completion_tokens = len(task.output.token_ids)
    return finished


def cut_short(task: Task, usage: frame_pb.Usage | None, now: float) -> frame_pb.StageFinished:
    """The end of a task that was aborted."""
    finished = frame_pb.StageFinished(finish_reason=frame_pb.FINISH_REASON_ABORT)
    if usage is not None:
        finished.usage.CopyFrom(usage)
    else:
        finished.usage.completion_tokens = len(task.output.token_ids)
    return complete(task, finished, now)


def end_of(
    tasks: Sequence[Task], reason: frame_pb.FinishReason.ValueType, started_at: float, now: float
) -> inference_pb.RequestFinished:
    """The last message of a stream that ends well."""
    finished = inference_pb.RequestFinished(finish_reason=reason, total=duration(now - started_at))
    for task in tasks:
        if task.finished is None:
            continue
        # A decode stage counts the prompt that its prefill stage has read.
        for name in _COUNTS if not task.planned.stage.is_prefill_only else ():
            value = getattr(task.finished.usage, name)
            if value:
                setattr(finished.usage, name, getattr(finished.usage, name) + value)
        suffix = task.companion.suffix if task.companion else ""
        finished.stages.add(stage=task.stage_name, finished=public(task), companion=suffix)
    return finished

"""Takes up a request that another head lost, from what its client has of it."""

from __future__ import annotations

from collections.abc import Mapping

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh_head.orchestration.losses import Fails, Losses
from stagemesh_head.orchestration.task import Task, TaskState

ALL = 1 << 30


def take_up(resume: inference_pb.ResumePoint, tasks: Mapping[str, Task], losses: Losses, now: float) -> Fails | None:
    """Put tasks into the state that their client knows; returns why the request cannot go on, or None.

    A finished stage is not run again, unless a later one needs more of it than its text. A stage that was under way
    resumes as after the loss of a replica.
    """
    lost = MeshError(Reason.REPLICA_LOST, "the head that ran the request was lost")
    for had in resume.stages:
        task = tasks.get(had.stage)
        if task is None:
            continue
        is_text = task.planned.stage.final_output_type == "text"
        if had.finished and not is_text and task.planned.consumers:
            task.skip_media = ALL
            continue
        task.output.token_ids.extend(had.token_ids)
        if had.text:
            task.output.texts.append(had.text)
        if had.finished:
            task.state = TaskState.DONE
            usage = frame_pb.Usage(completion_tokens=len(had.token_ids))
            task.finished = frame_pb.StageFinished(finish_reason=frame_pb.FINISH_REASON_STOP, usage=usage)
        elif not task.output.is_empty:
            verdict = losses.decide(task, lost, now)
            if isinstance(verdict, Fails):
                return verdict
            if verdict.restarts:
                task.output.clear()
        if task.planned.stage.is_decode_only and task.output.token_ids:
            # It computes the prompt itself, so that its prefill stage would work in vain.
            prefill = tasks[task.planned.inputs[0]]
            prefill.state = prefill.state if prefill.planned.inputs else TaskState.DONE
    return None

"""Makes the command that starts a task on its replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.wire import duration
from stagemesh_head.orchestration.media import prompt_of
from stagemesh_head.orchestration.pair import pair_up
from stagemesh_head.orchestration.plan import Plan
from stagemesh_head.orchestration.task import Task


def submission(
    plan: Plan,
    task: Task,
    tasks: Mapping[str, Task],
    inputs: Sequence[stage_pb.UpstreamOutput],
    *,
    more_input: bool,
    credit: int,
    now: float,
    deadline: float | None,
) -> stage_pb.SubmitTask:
    """The command for a task's present attempt; its slot is set by the link.

    Args:
        tasks: all of the request, by name.
        deadline: on the same clock as `now`; None is none.

    Raises:
        MeshError: STAGE_FAILED, a prefill stage gave no hand-off data.
    """
    request, planned, companion = plan.request, task.planned, task.companion
    command = stage_pb.SubmitTask(
        request_id=plan.request_id + (companion.suffix if companion else ""),
        attempt=task.attempt,
        prompt=prompt_of(companion.prompt if companion else request.prompt, planned.stage),
        inputs=inputs,
        params=planned.params,
        delta=plan.is_delta or planned.params.WhichOneof("params") == "llm",
        priority=request.priority,
        more_input=more_input,
        credit=credit,
        last_stage=not planned.consumers,
        cache_salt=request.cache_salt,
        traceparent=plan.trace.traceparent,
        tracestate=plan.trace.tracestate,
        companion_role=companion.role if companion else "",
    )
    if request.lora.name in planned.stage.lora_modules:
        command.lora.CopyFrom(request.lora)
    if request.HasField("data_parallel_rank"):
        command.data_parallel_rank = request.data_parallel_rank
    if request.HasField("reasoning_ended"):
        command.reasoning_ended = request.reasoning_ended
    if deadline is not None:
        command.time_left.CopyFrom(duration(deadline - now))
    if task.output.token_ids:
        command.resume_token_ids.extend(task.output.token_ids)
        command.resume_text_chars = len(task.output.text)
    pair_up(command, task, tasks, now)
    return command


def prompt_append(
    prompt: prompt_pb.Prompt | None, params: sampling_pb.SamplingParams | None, *, is_last: bool
) -> stage_pb.AppendInput:
    """The command that gives an interactive task its next chunk, but for the slot."""
    command = stage_pb.AppendInput(last=is_last)
    if prompt is not None:
        command.prompt.CopyFrom(prompt)
    if params is not None:
        command.params.CopyFrom(params)
    return command



"""Makes the command that starts a task on its replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from google.protobuf import struct_pb2

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.wire import duration
from stagemesh_head.orchestration.plan import Plan
from stagemesh_head.orchestration.task import Task

KV_TRANSFER = "kv_transfer_params"
_PREFILL_HAND_OFF: Mapping[str, bool | None] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What tells a prefill engine to keep its KV blocks for another one (the names are vLLM's)."""


def submission(
    plan: Plan,
    task: Task,
    inputs: Sequence[stage_pb.UpstreamOutput],
    producers: Sequence[Task],
    *,
    more_input: bool,
    credit: int,
    time_left_s: float | None,
) -> stage_pb.SubmitTask:
    """The command for a task's present attempt; its slot is set by the link.

    Raises:
        MeshError: STAGE_FAILED, a prefill stage gave no hand-off data.
    """
    request, planned = plan.request, task.planned
    command = stage_pb.SubmitTask(
        request_id=plan.request_id,
        attempt=task.attempt,
        prompt=request.prompt,
        inputs=inputs,
        params=planned.params,
        delta=plan.is_delta or planned.params.WhichOneof("params") == "llm",
        priority=request.priority,
        more_input=more_input,
        credit=credit,
        last_stage=not planned.consumers,
        cache_salt=request.cache_salt,
        traceparent=plan.traceparent,
    )
    if request.HasField("lora"):
        command.lora.CopyFrom(request.lora)
    if request.HasField("data_parallel_rank"):
        command.data_parallel_rank = request.data_parallel_rank
    if request.HasField("reasoning_ended"):
        command.reasoning_ended = request.reasoning_ended
    if time_left_s is not None:
        command.time_left.CopyFrom(duration(time_left_s))
    if task.output.token_ids:
        command.resume_token_ids.extend(task.output.token_ids)
        command.resume_text_chars = len(task.output.text)
    if planned.stage.is_prefill_only:
        _make_prefill(command)
    # What a prefill returned serves once: a later attempt computes the prompt itself.
    if planned.stage.is_decode_only and task.attempt == 1:
        command.kv_transfer_params.CopyFrom(_hand_off(task, producers))
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


def _make_prefill(command: stage_pb.SubmitTask) -> None:
    """One token, no stop condition, and KV blocks kept for the decode stage."""
    llm = sampling_pb.LlmSamplingParams()
    llm.CopyFrom(command.params.llm)
    for name in ("stop", "stop_token_ids", "min_tokens"):
        llm.ClearField(name)
    llm.max_tokens = 1
    command.params.llm.CopyFrom(llm)
    command.kv_transfer_params.update(_PREFILL_HAND_OFF)


def _hand_off(task: Task, producers: Sequence[Task]) -> struct_pb2.Struct:
    finished = producers[0].finished if producers else None
    if finished is None or KV_TRANSFER not in finished.extra:
        producer = producers[0].name if producers else "the prefill stage"
        raise MeshError(
            Reason.STAGE_FAILED,
            f"stage {task.name!r}: {producer} returned no {KV_TRANSFER}: check both stages' kv_transfer_config",
            stage=task.name,
        )
    return finished.extra.fields[KV_TRANSFER].struct_value

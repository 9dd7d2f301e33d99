"""A prefill/decode pair: one model in two stages, the second of which goes on from the KV blocks of the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from google.protobuf import struct_pb2

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh.v1 import stage_pb2 as stage_pb

if TYPE_CHECKING:
    from stagemesh_head.orchestration.task import Task

KV_TRANSFER = "kv_transfer_params"
_KEEP_BLOCKS: Mapping[str, bool | None] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What tells a prefill engine to keep its KV blocks for another one (the names are vLLM's)."""
LEASE_S = 30.0
"""How long vLLM keeps them for a decode engine that it did not hear of, unless its configuration says otherwise."""
LEASE_SHARE = 2 / 3
"""Of the lease: an older hand-off is not used. Blocks that expired hold another request, and nobody would notice."""


def prefill_params(decode: sampling_pb.SamplingParams) -> sampling_pb.SamplingParams:
    """What a prefill stage runs with: the same prompt as its decode stage, and one token, which is thrown away."""
    llm = sampling_pb.LlmSamplingParams(max_tokens=1, temperature=0.0)
    if decode.llm.HasField("truncate_prompt_tokens"):
        llm.truncate_prompt_tokens = decode.llm.truncate_prompt_tokens
    return sampling_pb.SamplingParams(llm=llm)


def read_by(task: Task, tasks: Mapping[str, Task]) -> Sequence[Task]:
    """The tasks whose output makes a task's prompt: a decode stage reads what its prefill stage has read."""
    producers = [tasks[name] for name in task.planned.inputs]
    return read_by(producers[0], tasks) if task.planned.stage.is_decode_only else producers


def pair_up(command: stage_pb.SubmitTask, task: Task, tasks: Mapping[str, Task], now: float) -> None:
    """Add what the two stages of a pair need to the command of one of them; other stages need nothing.

    Raises:
        MeshError: STAGE_FAILED, the prefill stage gave no hand-off data.
    """
    if task.planned.stage.is_prefill_only:
        command.kv_transfer_params.update(_KEEP_BLOCKS)
    elif task.planned.stage.is_decode_only:
        prefill = tasks[task.planned.inputs[0]]
        if _may_use(task, prefill, now):
            command.kv_transfer_params.CopyFrom(_hand_off(task, prefill))


def public(task: Task) -> frame_pb.StageFinished:
    """How a stage ended, without the addresses inside the mesh that its hand-off names."""
    assert task.finished is not None
    if KV_TRANSFER not in task.finished.extra:
        return task.finished
    shown = frame_pb.StageFinished()
    shown.CopyFrom(task.finished)
    del shown.extra.fields[KV_TRANSFER]
    return shown


def _may_use(task: Task, prefill: Task, now: float) -> bool:
    """Whether a decode attempt gets the hand-off; without it the decode engine computes the prompt itself.

    It serves once, for it is not known how far a lost attempt came with it. It covers the prompt alone, not tokens to
    resume from. There is none when the stages before made nothing, so that there was no prompt.
    """
    if task.attempt > 1 or task.output.token_ids:
        return False
    if prefill.finished is not None and prefill.finished.finish_reason == frame_pb.FINISH_REASON_COMPLETE:
        return False
    config = prefill.planned.stage.engine_args.get("kv_transfer_config") or {}
    lease_s = (config.get("kv_connector_extra_config") or {}).get("kv_lease_duration", LEASE_S)
    return now - prefill.times.done_at <= float(lease_s) * LEASE_SHARE


def _hand_off(task: Task, prefill: Task) -> struct_pb2.Struct:
    finished = prefill.finished
    if finished is None or KV_TRANSFER not in finished.extra:
        raise MeshError(
            Reason.STAGE_FAILED,
            f"stage {task.name!r}: {prefill.name} returned no {KV_TRANSFER}: check both stages' kv_transfer_config",
            stage=task.name,
        )
    return finished.extra.fields[KV_TRANSFER].struct_value

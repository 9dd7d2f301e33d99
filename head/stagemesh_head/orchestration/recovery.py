"""What a task can do when its replica is lost after output arrived: the table of resume modes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import sampling_pb2 as sampling_pb

if TYPE_CHECKING:
    from stagemesh_head.orchestration.task import Task


class ResumeMode(Enum):
    """How a task goes on elsewhere; values are those of `StageFinished.recovery`."""

    EXACT = "exact"
    """From the tokens so far; what follows is what would have followed."""
    CONTINUED = "continued"
    """From the tokens so far; what follows is a valid continuation, but another one."""
    RESTARTED = "restarted"
    """From the beginning."""


SEVERITY = {"": 0, ResumeMode.EXACT.value: 1, ResumeMode.RESTARTED.value: 2, ResumeMode.CONTINUED.value: 3}
"""A task that survived several losses reports the gravest."""

RETRY_ELSEWHERE = frozenset(
    {
        Reason.REPLICA_LOST,
        Reason.ENGINE_DEAD,
        Reason.ENGINE_STUCK,
        Reason.DRAINING,
        Reason.UNREACHABLE,
        Reason.STALE_INCARNATION,
        Reason.OVERLOADED,
    }
)
"""A task that fails for one of these reasons says something of its replica, not of the request."""


@dataclass(frozen=True, slots=True)
class RecoveryLimits:
    """Bounds on survival. Zero further attempts switches it off."""

    max_attempts: int = 3
    """Attempts of one task in all."""
    max_total_s: float = 60.0
    """Longest time from a request's first loss to its last new attempt, in seconds."""


def resume_mode(params: sampling_pb.SamplingParams) -> ResumeMode:
    """The mode that a task's sampling allows (measured with vLLM, float32).

    Counting penalties count output tokens, and replayed tokens would have become prompt; a grammar would start from its
    beginning; a truncated prompt would lose other tokens; with n > 1 one stream of tokens is not the state.
    """
    if params.WhichOneof("params") != "llm":
        return ResumeMode.RESTARTED
    llm = params.llm
    if (
        llm.n > 1
        or llm.presence_penalty
        or llm.frequency_penalty
        or llm.HasField("structured_outputs")
        or llm.HasField("truncate_prompt_tokens")
    ):
        return ResumeMode.RESTARTED
    # Unset, the engine samples with the model's own temperature.
    is_greedy = llm.HasField("temperature") and llm.temperature == 0
    return ResumeMode.EXACT if is_greedy else ResumeMode.CONTINUED


def mode_after_loss(task: Task, *, is_delivered: bool, exact_or_fail: bool) -> ResumeMode | None:
    """How a task that lost its replica goes on; None when it cannot.

    Args:
        is_delivered: the client may have some of the task's output.
        exact_or_fail: the client takes no other continuation than the exact one.
    """
    output, mode = task.output, task.planned.resume
    if output.is_empty:
        return ResumeMode.RESTARTED
    can_replay = bool(output.token_ids) and not output.pieces and not any(delta.index for delta in output.deltas)
    if can_replay and (mode is ResumeMode.EXACT or (mode is ResumeMode.CONTINUED and not exact_or_fail)):
        return mode
    if not is_delivered:
        return ResumeMode.RESTARTED
    # Files that a seed makes again are known by their index; text, sound and tensors cannot be taken back.
    only_media = not (output.token_ids or output.deltas) and all(piece.HasField("media") for piece in output.pieces)
    return ResumeMode.RESTARTED if only_media else None


def loss_error(task: Task, cause: MeshError, *, is_delivered: bool) -> MeshError:
    """The error of a task that lost its replica and does not go on."""
    if not is_delivered:
        return cause
    tokens, pieces = len(task.output.token_ids), len(task.output.pieces)
    return MeshError(
        Reason.STAGE_LOST,
        f"stage {task.name!r} lost its replica after {tokens} tokens and {pieces} other pieces were delivered, and "
        f"this request cannot go on elsewhere: {cause.message}",
        stage=task.name,
        delivered_tokens=tokens,
        delivered_pieces=pieces,
    )

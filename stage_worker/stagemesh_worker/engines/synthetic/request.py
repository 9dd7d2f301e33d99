"""A synthetic task's parameters, checked, and the key that its output is a function of."""

from __future__ import annotations

from dataclasses import dataclass

from stagemesh.rpc.errors import invalid
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh_worker.engines.base import EngineInput, EngineTask
from stagemesh_worker.engines.synthetic.content import EOS_TOKEN_ID, TokenStream, text_of, token_ids_of
from stagemesh_worker.engines.synthetic.options import SyntheticOptions

MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class TextPlan:
    """All that is known of a text before its first token is made."""

    stream: TokenStream
    start: int
    """Position of the first token to make; above 0 for a task that resumes."""
    end: int
    """Position after the last one."""
    finish_reason: frame_pb.FinishReason.ValueType
    stop_reason: str
    text_end: int | None
    """Characters of the text in all, where a stop text cuts it."""


def prompt_key(value: EngineInput) -> bytes:
    """The bytes that stand for a prompt."""
    parts = [value.text or "", *(f"{m['role']}:{m['content']}" for m in value.messages or ())]
    key = "\x00".join(parts).encode() + b"\x01" + ",".join(map(str, value.token_ids or ())).encode()
    if value.embeds is not None:
        key += value.embeds.tobytes()
    for name, array in sorted(value.tensors.items()):
        key += name.encode() + array.tobytes()
    for media in value.media:
        key += media.SerializeToString(deterministic=True)
    return key


def prompt_text(value: EngineInput) -> str:
    """The readable part of a prompt."""
    return value.text or " ".join(message["content"] for message in value.messages or ())


def prompt_tokens(value: EngineInput) -> int:
    """Tokens of a prompt, as usage counts them."""
    if value.embeds is not None:
        return int(value.embeds.shape[0])
    return len(value.token_ids) if value.token_ids is not None else len(token_ids_of(prompt_text(value)))


def task_key(task: EngineTask, value: EngineInput) -> bytes:
    """The key of a task's output: its prompt, its seed unless it is greedy, its adapter."""
    params = task.submit.params
    seed = params.diffusion.seed if params.HasField("diffusion") else params.llm.seed
    if params.HasField("llm") and params.llm.HasField("temperature") and params.llm.temperature == 0:
        seed = 0
    return prompt_key(value) + f"\x02{seed}\x02{task.submit.lora.name}\x02{task.submit.companion_role}".encode()


def check_llm(params: sampling_pb.LlmSamplingParams) -> None:
    """Refuse values that no LLM takes, and what this engine cannot do. Raises MeshError(INVALID_REQUEST)."""
    if params.HasField("temperature") and params.temperature < 0:
        raise invalid("temperature", params.temperature, "want 0 or more")
    if params.HasField("top_p") and not 0 < params.top_p <= 1:
        raise invalid("top_p", params.top_p, "want above 0, at most 1")
    if params.HasField("max_tokens") and not 1 <= params.max_tokens <= MAX_TOKENS:
        raise invalid("max_tokens", params.max_tokens, f"want 1 to {MAX_TOKENS}")
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        raise invalid("min_tokens", params.min_tokens, f"want at most max_tokens = {params.max_tokens}")
    if params.HasField("n") and params.n != 1:
        raise invalid("n", params.n, "the synthetic engine makes 1 completion")
    for field in ("logprobs", "prompt_logprobs", "structured_outputs"):
        if params.HasField(field):
            raise invalid(field, "set", "the synthetic engine cannot do this")


def plan_text(task: EngineTask, value: EngineInput, options: SyntheticOptions) -> TextPlan:
    """How the text of `value` runs, from where the task resumes to where it ends. Raises MeshError."""
    params = task.submit.params.llm
    check_llm(params)
    stream = TokenStream.of(task_key(task, value))
    budget = params.max_tokens if params.HasField("max_tokens") else None
    natural = None if params.ignore_eos else max(options.tokens, params.min_tokens)
    if natural is None and budget is None:
        budget = MAX_TOKENS
    if natural is not None and (budget is None or natural <= budget):
        end, reason = natural, frame_pb.FINISH_REASON_STOP
    else:
        assert budget is not None
        end, reason = budget, frame_pb.FINISH_REASON_LENGTH
    end, text_end, stop_reason = _first_stop(stream, params, end)
    if stop_reason:
        reason = frame_pb.FINISH_REASON_STOP
    resumed = list(task.submit.resume_token_ids)
    start = end if resumed and resumed[-1] == EOS_TOKEN_ID else min(len(resumed), end)
    return TextPlan(stream, start, end, reason, stop_reason, text_end)


def _first_stop(stream: TokenStream, params: sampling_pb.LlmSamplingParams, end: int) -> tuple[int, int | None, str]:
    """(position after the last token, characters of text or None, what stopped it or "")."""
    if not params.stop and not params.stop_token_ids:
        return end, None, ""
    ids = stream.tokens(0, end)
    stop_ids = set(params.stop_token_ids)
    by_id = next((at for at, token in enumerate(ids) if token in stop_ids and at >= params.min_tokens), None)
    if by_id is not None:
        ids = ids[: by_id + 1]
    text = text_of(ids)
    after = len(text_of(ids[: params.min_tokens]))
    found = min(((text.find(stop, max(0, after - len(stop) + 1)), stop) for stop in params.stop if stop in text),
                default=(-1, ""))  # fmt: skip
    if found[0] >= 0:
        place, stop = found
        length = count = 0
        while length < place + len(stop):
            length += len(text_of(ids[count : count + 1]))
            count += 1
        return count, place + len(stop) * params.include_stop_str_in_output, stop
    if by_id is not None:
        return len(ids), None, str(ids[-1])
    return end, None, ""

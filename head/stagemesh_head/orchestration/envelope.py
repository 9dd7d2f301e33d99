"""Checks everything of a request but its sampling parameters, before anything of it is kept or submitted."""

from __future__ import annotations

import uuid

from stagemesh.config import Pipeline, Stage
from stagemesh.names import REQUEST_ID, REQUEST_ID_WORDS
from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb

MAX_LABEL_CHARS = 256
CHAT_ROLES = ("system", "user", "assistant", "tool")
OUTPUT_MODES = frozenset(inference_pb.OutputMode.values())
RECOVERY_POLICIES = frozenset(inference_pb.RecoveryPolicy.values())
MEDIA_MODALITIES = ("image", "audio", "video")


def check_envelope(request: inference_pb.GenerateRequest, pipeline: Pipeline) -> None:
    """Give the request an id when it has none, and refuse what cannot be right.

    Raises:
        MeshError: INVALID_REQUEST or PROMPT_TOO_LARGE, naming the field.
    """
    if not request.request_id:
        request.request_id = uuid.uuid4().hex
    elif not REQUEST_ID.fullmatch(request.request_id):
        raise invalid("request_id", request.request_id, f"must be {REQUEST_ID_WORDS}")
    first = pipeline.stages[0]
    check_prompt(request.prompt, first)
    for field, value in (("session_id", request.session_id), ("cache_salt", request.cache_salt)):
        if len(value) > MAX_LABEL_CHARS:
            raise invalid(field, value, f"is longer than {MAX_LABEL_CHARS} characters")
    if request.output_mode not in OUTPUT_MODES:
        raise invalid("output_mode", request.output_mode, "must be DELTA or FINAL_ONLY")
    if request.recovery_policy not in RECOVERY_POLICIES:
        raise invalid("recovery_policy", request.recovery_policy, "must be BEST_EFFORT or EXACT_OR_FAIL")
    if request.HasField("lora"):
        _check_lora(request, pipeline)
    if request.HasField("resume"):
        _check_resume(request.resume, pipeline)


def check_prompt(prompt: prompt_pb.Prompt, stage: Stage, field: str = "prompt") -> None:
    """Refuse a prompt that is empty, too large, or not what it says it is."""
    limit = stage.limits.max_prompt_bytes
    size = prompt.ByteSize()
    if size > limit:
        raise MeshError(
            Reason.PROMPT_TOO_LARGE,
            f"{field}: {size} bytes: stage {stage.name!r} takes at most {limit} bytes (limits.max_prompt_bytes)",
            field=field,
            size_bytes=size,
            limit_bytes=limit,
        )
    kind = prompt.WhichOneof("content")
    if kind is None:
        raise invalid(field, "", "is missing: set text, chat, tokens or embeds")
    if kind == "text" and not prompt.text:
        raise invalid(f"{field}.text", "", "is empty")
    if kind == "tokens" and not prompt.tokens.ids:
        raise invalid(f"{field}.tokens", [], "is empty")
    if kind == "embeds":
        _check_inline(prompt.embeds, f"{field}.embeds")
    if kind == "chat":
        _check_chat(prompt.chat, f"{field}.chat")
    for position, media in enumerate(prompt.media):
        _check_media(media, f"{field}.media[{position}]")


def _check_chat(chat: prompt_pb.ChatPrompt, field: str) -> None:
    if not chat.messages:
        raise invalid(f"{field}.messages", [], "is empty")
    for position, message in enumerate(chat.messages):
        if message.role not in CHAT_ROLES:
            raise invalid(f"{field}.messages[{position}].role", message.role, f"must be one of {', '.join(CHAT_ROLES)}")
    if not any(message.content for message in chat.messages):
        raise invalid(f"{field}.messages", "", "all messages are empty")


def _check_media(media: prompt_pb.MediaInput, field: str) -> None:
    if media.modality not in MEDIA_MODALITIES:
        raise invalid(f"{field}.modality", media.modality, f"must be one of {', '.join(MEDIA_MODALITIES)}")
    source = media.WhichOneof("source")
    if source is None or (source == "data" and not media.data):
        raise invalid(field, "", "is empty: set data, url or tensor")
    if source == "tensor":
        _check_inline(media.tensor, f"{field}.tensor")


def _check_inline(value: tensor_pb.TensorValue, field: str) -> None:
    # A reference would send a replica, with its token, to whatever address the client names.
    if not value.HasField("inline"):
        given = "a reference" if value.HasField("ref") else ""
        raise invalid(field, given, "want an inline tensor: references are for what stages make")


def _check_lora(request: inference_pb.GenerateRequest, pipeline: Pipeline) -> None:
    known = sorted({name for stage in pipeline.stages for name in stage.lora_modules})
    if request.lora.name not in known:
        offered = ", ".join(known) if known else "none"
        raise invalid("lora.name", request.lora.name, f"is not on the pipeline's list; adapters are: {offered}")


def _check_resume(resume: inference_pb.ResumePoint, pipeline: Pipeline) -> None:
    names = {stage.name for stage in pipeline.stages}
    for position, stage in enumerate(resume.stages):
        if stage.stage not in names:
            raise invalid(f"resume.stages[{position}].stage", stage.stage, f"stages are {', '.join(sorted(names))}")

"""What people pass as a prompt, as the wire has it."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stagemesh.client.errors import invalid
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb

PromptLike = str | Sequence[int] | Sequence[Mapping[str, str]] | np.ndarray | prompt_pb.Prompt
"""Text, token ids, chat messages ({"role", "content"}), or embeddings [tokens, hidden]."""

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class MediaInput:
    """A picture, sound or video that goes with the prompt."""

    source: bytes | str | Path
    """The file's bytes, its path, or an http(s) URL, which the operator must have allowed."""
    modality: str = ""
    """image, audio or video; by the MIME type unless given."""
    mime_type: str = ""
    """By the file's name unless given."""
    uuid: str = ""
    """Stable id of the content for caches; empty: its hash."""


def to_prompt(prompt: PromptLike, *, negative: str = "", media: Sequence[MediaInput] = ()) -> prompt_pb.Prompt:
    """The prompt as a message. Raises InvalidRequest that says which forms there are."""
    message = _content(prompt)
    if negative:
        message.negative_text = negative
    message.media.extend(_media(item, position) for position, item in enumerate(media))
    return message


def first_chunk(chunk: PromptLike | None) -> PromptLike:
    """The chunk that opens an interactive request. Raises InvalidRequest when there is none."""
    if chunk is None:
        raise invalid("chunks", (), "is empty: an interactive request begins with its first chunk")
    return chunk


def _content(prompt: PromptLike) -> prompt_pb.Prompt:
    if isinstance(prompt, prompt_pb.Prompt):
        copy = prompt_pb.Prompt()
        copy.CopyFrom(prompt)
        return copy
    if isinstance(prompt, str):
        return prompt_pb.Prompt(text=prompt)
    if isinstance(prompt, np.ndarray) and prompt.ndim == 2:
        return prompt_pb.Prompt(embeds=tensor_pb.TensorValue(inline=_tensor(prompt)))
    if isinstance(prompt, np.ndarray) and prompt.ndim == 1:
        prompt = prompt.tolist()
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        if not prompt:
            raise invalid("prompt", prompt, "is empty")
        if all(isinstance(item, int) for item in prompt):
            return prompt_pb.Prompt(tokens=prompt_pb.TokenIds(ids=_token_ids(prompt)))
        if all(isinstance(item, Mapping) for item in prompt):
            messages = [_message(item, f"prompt[{position}]") for position, item in enumerate(prompt)]
            return prompt_pb.Prompt(chat=prompt_pb.ChatPrompt(messages=messages))
    raise invalid(
        "prompt",
        prompt,
        "want a text, chat messages ({'role', 'content'}), token ids, or a NumPy array [tokens, hidden]",
    )


def _token_ids(ids: Sequence[Any]) -> Sequence[int]:
    for position, token in enumerate(ids):
        if not 0 <= token < 1 << 32:
            raise invalid(f"prompt[{position}]", token, "token ids are at least 0 and below 2^32")
    return ids


def _message(message: Any, path: str) -> prompt_pb.ChatMessage:
    if set(message) != {"role", "content"} or not isinstance(message["content"], str):
        raise invalid(path, message, "want {'role': ..., 'content': a text}")
    if message["role"] not in _ROLES:
        raise invalid(f"{path}.role", message["role"], f"want one of {', '.join(_ROLES)}")
    return prompt_pb.ChatMessage(role=message["role"], content=message["content"])


def _tensor(array: np.ndarray) -> tensor_pb.Tensor:
    array = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return tensor_pb.Tensor(dtype=array.dtype.name, shape=array.shape, data=array.tobytes())


def _media(item: MediaInput, position: int) -> prompt_pb.MediaInput:
    path = f"media[{position}]"
    message = prompt_pb.MediaInput(modality=item.modality, mime_type=item.mime_type, uuid=item.uuid)
    if isinstance(item.source, bytes):
        message.data = item.source
    elif isinstance(item.source, str) and "://" in item.source:
        message.url = item.source
    else:
        try:
            message.data = Path(item.source).read_bytes()
        except OSError as error:
            raise invalid(path, str(item.source), f"cannot be read: {error.strerror}") from error
    if not message.mime_type and not isinstance(item.source, bytes):
        message.mime_type = mimetypes.guess_type(str(item.source))[0] or ""
    if not message.modality:
        message.modality = message.mime_type.partition("/")[0]
    if message.modality not in ("image", "audio", "video"):
        raise invalid(f"{path}.modality", message.modality, "want image, audio or video")
    return message

"""The built-in adapters. Each is cheap and pure, so that it runs on the event loop."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stagemesh.config import Stage
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh_worker.adapters.types import Adapter, StageInput
from stagemesh_worker.engines.base import EngineInput


def prompt(request: EngineInput, inputs: Sequence[StageInput], stage: Stage) -> EngineInput | None:
    """The request's own prompt as it is, whatever the stages before made."""
    return request


def text(request: EngineInput, inputs: Sequence[StageInput], stage: Stage) -> EngineInput | None:
    """Text of the stages before -> prompt. `adapter_args.template` may put words around it, such as "Draw {text}".

    Names in the template: `text` (all stages before), `prompt` (the request's own text), and each stage's name.
    """
    words = _words(request, inputs)
    if not words["text"]:
        return None if inputs else request
    return EngineInput(text=_fill(stage, words), media=request.media)


def chat(request: EngineInput, inputs: Sequence[StageInput], stage: Stage) -> EngineInput | None:
    """Text -> one user message of the model's chat template; a conversation stays as it is.

    `adapter_args.system` is put before it, `adapter_args.template` around the text as for `text`.
    """
    system = stage.adapter_args.get("system")
    before = ({"role": "system", "content": str(system)},) if system else ()
    if not inputs and request.messages is not None:
        given = () if request.messages[0]["role"] == "system" else before
        return replace(request, messages=(*given, *request.messages))
    if not inputs and (request.token_ids is not None or request.embeds is not None):
        return request
    words = _words(request, inputs)
    if not words["text"]:
        return None if inputs else request
    return EngineInput(messages=(*before, {"role": "user", "content": _fill(stage, words)}), media=request.media)


def tokens(request: EngineInput, inputs: Sequence[StageInput], stage: Stage) -> EngineInput | None:
    """Token ids of the stages before -> prompt tokens, one stage after the other."""
    if not inputs:
        return request
    ids = tuple(token_id for item in _own(inputs) for token_id in item.token_ids)
    return EngineInput(token_ids=ids, media=request.media) if ids else None


def embeds(request: EngineInput, inputs: Sequence[StageInput], stage: Stage) -> EngineInput | None:
    """A tensor [tokens, hidden] of the stages before -> prompt embeddings. `adapter_args.tensor` names it."""
    if not inputs:
        return request
    if all(item.is_empty for item in inputs):
        return None
    name = stage.adapter_args.get("tensor")
    found = {key: array for item in _own(inputs) for key, array in item.tensors.items()}
    if name is None:
        name = next((key for key in ("prompt_embeds", "hidden_states") if key in found), None)
        name = next(iter(found)) if name is None and len(found) == 1 else name
    if name not in found:
        wanted = f"tensor {name!r}" if name else "one tensor"
        raise MeshError(
            Reason.ADAPTER_FAILED,
            f"adapter embeds: want {wanted} from {_names(inputs)}, got {', '.join(found) or 'none'}",
            stage=stage.name,
        )
    array = found[name]
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2:
        raise MeshError(
            Reason.ADAPTER_FAILED,
            f"adapter embeds: tensor {name!r}: want [tokens, hidden], got shape {list(array.shape)}",
            stage=stage.name,
        )
    return EngineInput(embeds=array)


def diffusion(request: EngineInput, inputs: Sequence[StageInput], stage: Stage) -> EngineInput | None:
    """Text -> what to draw; the companion of role "negative" (`adapter_args.negative_role`) -> what to avoid, unless
    the request says that itself."""
    words = _words(request, inputs)
    role = str(stage.adapter_args.get("negative_role", "negative"))
    negative = request.negative_text or "".join(item.text for item in inputs if item.role == role) or None
    tensors = {key: array for item in _own(inputs) for key, array in item.tensors.items()}
    if not words["text"] and not tensors and request.embeds is None:
        return None if inputs else replace(request, text="")
    return EngineInput(
        text=_fill(stage, words) if words["text"] else None,
        negative_text=negative,
        embeds=None if inputs else request.embeds,
        tensors=tensors,
        media=request.media,
    )


def by_type(request: EngineInput, inputs: Sequence[StageInput], stage: Stage) -> EngineInput | None:
    """What a stage that names no adapter gets: by its own type and by what arrives."""
    if stage.stage_type == "diffusion":
        return diffusion(request, inputs, stage)
    if not inputs:
        return request
    if any("prompt_embeds" in item.tensors for item in _own(inputs)):
        return embeds(request, inputs, stage)
    if not any(item.text for item in inputs) and any(item.token_ids for item in inputs):
        return tokens(request, inputs, stage)
    made = text(request, inputs, stage)
    if made is None and any(item.tensors for item in inputs):
        return embeds(request, inputs, stage)
    return made


BUILT_IN: Mapping[str, Adapter] = {
    "prompt": prompt,
    "text": text,
    "chat": chat,
    "tokens": tokens,
    "embeds": embeds,
    "diffusion": diffusion,
}
"""By the names that `input_adapter` takes."""


def _own(inputs: Sequence[StageInput]) -> list[StageInput]:
    """What the request itself made, without its companions."""
    return [item for item in inputs if not item.role]


def _names(inputs: Sequence[StageInput]) -> str:
    return ", ".join(item.stage for item in inputs)


def _words(request: EngineInput, inputs: Sequence[StageInput]) -> dict[str, str]:
    """The texts that a template may name."""
    own = request.text or ""
    if not own and request.messages:
        own = next((m["content"] for m in reversed(request.messages) if m["role"] == "user"), "")
    words = {item.stage: item.text for item in _own(inputs)}
    return words | {"prompt": own, "text": "".join(item.text for item in _own(inputs)) if inputs else own}


def _fill(stage: Stage, words: Mapping[str, str]) -> str:
    template: Any = stage.adapter_args.get("template")
    if template is None:
        return words["text"]
    try:
        return string.Formatter().vformat(str(template), (), words)
    except (KeyError, IndexError, ValueError) as error:
        raise MeshError(
            Reason.ADAPTER_FAILED,
            f"adapter_args.template: {template!r}: {error}; names it may use: {', '.join(words)}",
            stage=stage.name,
        ) from None

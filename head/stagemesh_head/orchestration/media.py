"""Which stages get which of a prompt's pictures, sounds and videos: those that say so by `media_inputs`."""

from __future__ import annotations

from collections.abc import Sequence

from stagemesh.config import Stage
from stagemesh.rpc.errors import invalid
from stagemesh.v1 import prompt_pb2 as prompt_pb

_ALLOWED_BY = {"http": "allowed_media_domains", "https": "allowed_media_domains", "file": "allowed_local_media_path"}
"""Scheme of a URL -> the engine argument by which the operator allows it."""


def check_media(prompt: prompt_pb.Prompt, stages: Sequence[Stage], field: str = "prompt") -> None:
    """Refuse an item that no stage of the request reads, and a URL where a stage that reads it may not.

    Raises:
        MeshError: INVALID_REQUEST that names the item.
    """
    for position, item in enumerate(prompt.media):
        where = f"{field}.media[{position}]"
        readers = [stage for stage in stages if item.modality in stage.media_inputs]
        if not readers:
            reads = "; ".join(f"{stage.name} reads {', '.join(stage.media_inputs) or 'none'}" for stage in stages)
            raise invalid(f"{where}.modality", item.modality, f"no stage of this request reads it ({reads})")
        if item.WhichOneof("source") == "url":
            _check_url(item.url, readers, f"{where}.url")


def prompt_of(prompt: prompt_pb.Prompt, stage: Stage) -> prompt_pb.Prompt:
    """The prompt with the media that the stage reads."""
    media = [item for item in prompt.media if item.modality in stage.media_inputs]
    if len(media) == len(prompt.media):
        return prompt
    kind = prompt.WhichOneof("content")
    content = {kind: getattr(prompt, kind)} if kind is not None else {}
    return prompt_pb.Prompt(**content, media=media, negative_text=prompt.negative_text)


def _check_url(url: str, readers: Sequence[Stage], field: str) -> None:
    # The engine checks the very path or domain; the head refuses where the operator allowed none.
    scheme = url.split(":", 1)[0].lower()
    if scheme not in _ALLOWED_BY:
        raise invalid(field, url, "must be an http, https or file URL")
    for stage in readers:
        if not stage.engine_args.get(_ALLOWED_BY[scheme]):
            raise invalid(field, url, f"is not allowed: stage {stage.name!r} sets no engine_args.{_ALLOWED_BY[scheme]}")

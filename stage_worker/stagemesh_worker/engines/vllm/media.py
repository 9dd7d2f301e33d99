"""Images, sound and video of a prompt, decoded as vLLM's processors take them."""

from __future__ import annotations

import asyncio
import io
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from stagemesh.rpc.errors import invalid
from stagemesh.tensors import decode
from stagemesh.v1 import prompt_pb2 as prompt_pb

MAX_IMAGE_PIXELS = 64 << 20
"""Largest image accepted: 64 Mi pixels."""

MODALITIES = ("image", "audio", "video")


async def multi_modal_data(
    media: Sequence[prompt_pb.MediaInput], model_config: Any
) -> tuple[dict[str, list[Any]], dict[str, list[str | None]]]:
    """(decoded items by modality, cache ids by modality), both in the prompt's order.

    Raises:
        MeshError: INVALID_REQUEST that names the item.
    """
    if model_config.multimodal_config is None:
        raise invalid("prompt.media", len(media), "the model of this stage reads text only")
    data: dict[str, list[Any]] = defaultdict(list)
    uuids: dict[str, list[str | None]] = defaultdict(list)
    for number, item in enumerate(media):
        where = f"prompt.media[{number}]"
        if item.modality not in MODALITIES:
            raise invalid(f"{where}.modality", item.modality, f"want one of {', '.join(MODALITIES)}")
        data[item.modality].append(await _load(item, where, model_config))
        uuids[item.modality].append(item.uuid or None)
    return dict(data), dict(uuids)


async def _load(item: prompt_pb.MediaInput, where: str, model_config: Any) -> Any:
    source = item.WhichOneof("source")
    if source == "url":
        return await _fetch(item, where, model_config)
    if source == "tensor":
        return decode(item.tensor.inline)
    if source != "data":
        raise invalid(where, "(empty)", "want one of data, url, tensor")
    try:
        if item.modality == "image":
            return await asyncio.to_thread(_image, item.data)
        return await asyncio.to_thread(_by_vllm, item)
    except Exception as error:  # decoders raise whatever they like at broken files
        raise invalid(f"{where}.data", f"{len(item.data)} bytes", f"is no {item.modality} file: {error}") from error


def _image(data: bytes) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(data))
    if image.width * image.height > MAX_IMAGE_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels; at most {MAX_IMAGE_PIXELS}")
    return image.convert("RGB")


def _by_vllm(item: prompt_pb.MediaInput) -> Any:
    from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO

    if item.modality == "audio":
        return AudioMediaIO().load_bytes(item.data)
    return VideoMediaIO(ImageMediaIO()).load_bytes(item.data)


async def _fetch(item: prompt_pb.MediaInput, where: str, model_config: Any) -> Any:
    """A URL, if the operator allows its domain or path; vLLM's connector enforces both."""
    from vllm.multimodal.media import MediaConnector

    path, domains = model_config.allowed_local_media_path, model_config.allowed_media_domains
    if not path and not domains:
        raise invalid(f"{where}.url", item.url, "URLs are off: set allowed_media_domains or allowed_local_media_path")
    connector = MediaConnector(allowed_local_media_path=path, allowed_media_domains=domains)
    fetch = getattr(connector, f"fetch_{item.modality}_async")
    try:
        return await fetch(item.url)
    except Exception as error:
        raise invalid(f"{where}.url", item.url, str(error)) from error

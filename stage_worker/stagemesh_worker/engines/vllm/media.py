"""Images, sound and video of a prompt, decoded as vLLM's processors take them, with the keys of its caches."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, MediaConnector, VideoMediaIO

from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.tensors import decode
from stagemesh.v1 import prompt_pb2 as prompt_pb

MODALITIES = ("image", "audio", "video")
ALLOWED_BY = {"http": "allowed_media_domains", "https": "allowed_media_domains", "file": "allowed_local_media_path"}
"""Scheme of a URL -> the engine argument by which the operator allows it."""
MAX_REMEMBERED_IDS = 10_000
"""Ids of clients whose content is remembered; as many as the caches behind them are likely to hold."""

MultiModal = tuple[dict[str, list[Any]], dict[str, list[str]]]
"""(decoded items by modality, cache keys by modality), both in the prompt's order."""


class MediaReader:
    """Reads the media of prompts for one replica."""

    def __init__(self, model_config: Any, scope: str) -> None:
        """
        Args:
            scope: goes before every cache key: what one replica has seen is never taken for seen by another.

        Raises:
            ValueError: `allowed_local_media_path` is no folder.
        """
        self._model = model_config
        self._scope = scope
        self._contents: OrderedDict[str, str] = OrderedDict()
        if model_config.multimodal_config is None:
            return
        settings = model_config.multimodal_config.media_io_kwargs
        pictures = ImageMediaIO(**settings.get("image", {}))
        self._files = {
            "image": pictures,
            "audio": AudioMediaIO(**settings.get("audio", {})),
            "video": VideoMediaIO(pictures, **settings.get("video", {})),
        }
        self._connector = MediaConnector(
            settings,
            allowed_local_media_path=model_config.allowed_local_media_path,
            allowed_media_domains=model_config.allowed_media_domains,
        )

    async def read(self, media: Sequence[prompt_pb.MediaInput], cache_salt: str = "") -> MultiModal:
        """Decode the items and make their keys: `<scope>:<salt>:<the client's id, or a hash of the content>`.

        Raises:
            MeshError: INVALID_REQUEST that names the item; UNSUPPORTED when a decoder is not installed here.
        """
        if self._model.multimodal_config is None:
            raise invalid("prompt.media", len(media), "the model of this stage reads text only")
        data: dict[str, list[Any]] = defaultdict(list)
        keys: dict[str, list[str]] = defaultdict(list)
        for number, item in enumerate(media):
            where = f"prompt.media[{number}]"
            if item.modality not in MODALITIES:
                raise invalid(f"{where}.modality", item.modality, f"want one of {', '.join(MODALITIES)}")
            loaded = await self._load(item, where)
            data[item.modality].append(loaded)
            keys[item.modality].append(await self._key(item, loaded, cache_salt, where))
        return dict(data), dict(keys)

    async def _load(self, item: prompt_pb.MediaInput, where: str) -> Any:
        source = item.WhichOneof("source")
        if source == "url":
            return await self._fetch(item, where)
        if source == "tensor":
            return _from_tensor(item, where)
        if source != "data":
            raise invalid(where, "(empty)", "want one of data, url, tensor")
        try:
            return await asyncio.to_thread(self._files[item.modality].load_bytes, item.data)
        except ImportError as error:
            problem = f"{where}: this replica cannot read {item.modality}: {error}"
            raise MeshError(Reason.UNSUPPORTED, problem, field=where) from error
        except Exception as error:  # decoders raise whatever they like at broken files
            raise invalid(f"{where}.data", f"{len(item.data)} bytes", f"is no {item.modality} file: {error}") from error

    async def _fetch(self, item: prompt_pb.MediaInput, where: str) -> Any:
        """A URL whose scheme the operator has opened; vLLM's connector checks the very domain or folder."""
        setting = ALLOWED_BY.get(item.url.partition(":")[0].lower())
        if setting is None:
            raise invalid(f"{where}.url", item.url, "must be an http, https or file URL")
        if not getattr(self._model, setting):
            # The connector takes an empty list of domains for "all of them".
            raise invalid(f"{where}.url", item.url, f"is not allowed: the stage sets no engine_args.{setting}")
        try:
            return await getattr(self._connector, f"fetch_{item.modality}_async")(item.url)
        except Exception as error:  # of the network, the file system and the decoders
            raise invalid(f"{where}.url", item.url, str(error) or type(error).__name__) from error

    async def _key(self, item: prompt_pb.MediaInput, loaded: Any, salt: str, where: str) -> str:
        algorithm = self._model.multimodal_config.mm_hasher_algorithm
        digest = await asyncio.to_thread(MultiModalHasher.hash_kwargs, algorithm, media=loaded)
        key = ":".join(part for part in (self._scope, salt, item.uuid or digest) if part)
        known = self._contents.setdefault(key, digest) if item.uuid else digest
        if known != digest:
            # Else the caches would answer with another picture, maybe another client's.
            raise invalid(f"{where}.uuid", item.uuid, "named other content before; leave it empty, or set a cache_salt")
        if item.uuid:
            self._contents.move_to_end(key)
            if len(self._contents) > MAX_REMEMBERED_IDS:
                self._contents.popitem(last=False)
        return key


def _from_tensor(item: prompt_pb.MediaInput, where: str) -> Any:
    """Pixels or samples; other shapes would mean embeddings to vLLM."""
    array = decode(item.tensor.inline)
    if item.modality == "audio":
        if array.ndim != 1 or array.dtype != np.float32:
            raise invalid(f"{where}.tensor", [array.dtype.name, *array.shape], "want float32 [samples]")
        return array
    wanted = 3 if item.modality == "image" else 4
    if array.dtype != np.uint8 or array.ndim != wanted or array.shape[-1] != 3 or not array.size:
        shape = "[height, width, 3]" if wanted == 3 else "[frames, height, width, 3]"
        raise invalid(f"{where}.tensor", [array.dtype.name, *array.shape], f"want uint8 {shape}")
    return Image.fromarray(array) if wanted == 3 else array

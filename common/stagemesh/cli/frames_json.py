"""Frames as lines of JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Self

import numpy as np

from stagemesh.cli.saving import SoundSaver, save_media
from stagemesh.client.frames import AudioChunk, Frame, Media


class JsonPrinter:
    """One line a frame: its kind as `type`, its fields, and `path` in the place of a file's bytes.

    A piece of sound has the number of its samples, and the last one the `path` of the whole.
    """

    def __init__(self, directory: Path, request_id: str) -> None:
        self._directory = directory
        self._request_id = request_id
        self._sounds = SoundSaver(directory, request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, frame: Frame) -> None:
        """Print a frame."""
        print(json.dumps({"type": _snake(type(frame).__name__), **self._fields(frame)}), flush=True)

    def _fields(self, value: Any) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: self._plain(getattr(value, name)) for name in names if name != "samples"}
        if isinstance(value, Media):
            fields["path"] = str(save_media(value, self._directory, self._request_id))
            del fields["data"]
        if isinstance(value, AudioChunk):
            fields["samples"] = len(value.samples)
            if (saved := self._sounds.add(value)) is not None:
                fields["path"] = str(saved[1])
        return fields

    def _plain(self, value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return self._fields(value)
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, tuple | list):
            return [self._plain(item) for item in value]
        if hasattr(value, "items"):
            return {key: self._plain(item) for key, item in value.items()}
        return len(value) if isinstance(value, bytes) else value


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()

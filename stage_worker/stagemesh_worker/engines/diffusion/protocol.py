"""Messages between the engine and its child, over ZeroMQ.

A message is one JSON header {"type", ...fields} and, where it carries arrays, one raw frame for each: the header's
`arrays` lists (name, dtype, shape) in the order of the frames. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

HIGH_WATER_MARK = 256
"""Messages that wait in one direction before the sender waits: bounds the memory of a side that stands still."""


class ProtocolError(ValueError):
    """The other side said something that is not a message."""


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages: its fields are the header's, but for `arrays`, which travel as frames."""

    type: ClassVar[str]


# ------------------------------------------------------------------ engine -> child
@dataclass(frozen=True, slots=True)
class Item:
    """One request's part of a job."""

    item: int
    """Number of the request on this wire."""
    prompt: str | None
    negative_prompt: str | None
    seeds: tuple[int, ...]
    """One per picture."""
    preview_interval: int = 0
    """Steps between previews; 0 is none."""


@dataclass(frozen=True, slots=True)
class Run(Message):
    """Make the pictures of these requests in one call of the pipeline."""

    type: ClassVar[str] = "run"
    items: tuple[Item, ...]
    call: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the call that all of them share."""
    latents_out: bool = False
    """Hand out the latents instead of decoded pictures."""
    lora: str | None = None
    lora_scale: float = 1.0
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    """Arguments that are arrays: prompt embeddings, latents, an input picture."""


@dataclass(frozen=True, slots=True)
class Abort(Message):
    """Let go of a request."""

    type: ClassVar[str] = "abort"
    item: int


@dataclass(frozen=True, slots=True)
class Call(Message):
    """Run a control method; answered by Result between two jobs, `ping` also between two steps."""

    type: ClassVar[str] = "call"
    call: int
    method: str
    args: Mapping[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------ child -> engine
@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The pipeline is loaded; `pipeline` is a PipelineFacts as a dict."""

    type: ClassVar[str] = "ready"
    pipeline: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """The pipeline cannot be loaded; the child ends. `fatal`: the configuration is wrong."""

    type: ClassVar[str] = "failed"
    message: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class Step(Message):
    """The job made a step; for the items named a preview of the first picture follows as an array of that name."""

    type: ClassVar[str] = "step"
    items: tuple[int, ...]
    step: int
    total: int
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output(Message):
    """One finished picture, sound, video or latent: array "output"."""

    type: ClassVar[str] = "output"
    item: int
    index: int
    seed: int
    kind: str
    """"image" uint8 [height, width, channels], "video" uint8 [frames, height, width, channels], "audio" float32
    [samples, channels] or "latent"."""
    flagged: bool = False
    """The pipeline's safety checker blanked it."""
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ItemEnded(Message):
    """Nothing follows of this request. `status`: "done", "aborted", "invalid" (`field`, `message`) or "failed"."""

    type: ClassVar[str] = "item_ended"
    item: int
    status: str
    steps: int = 0
    message: str = ""
    field: str = ""


@dataclass(frozen=True, slots=True)
class JobEnded(Message):
    """The child takes the next job."""

    type: ClassVar[str] = "job_ended"


@dataclass(frozen=True, slots=True)
class Result(Message):
    """Answer to a Call: `value`, or `error`; `refused`: the caller's arguments are wrong."""

    type: ClassVar[str] = "result"
    call: int
    value: Any = None
    error: str | None = None
    refused: bool = False


_TYPES: dict[str, type[Message]] = {
    kind.type: kind for kind in (Run, Abort, Call, Ready, Failed, Step, Output, ItemEnded, JobEnded, Result)
}


def encode(message: Message) -> list[bytes | memoryview]:
    """The frames of `message`; arrays are not copied where they are contiguous."""
    header: dict[str, Any] = {"type": message.type}
    frames: list[bytes | memoryview] = []
    for entry in fields(message):
        value = getattr(message, entry.name)
        if entry.name == "arrays":
            contiguous = {name: np.ascontiguousarray(array) for name, array in value.items()}
            header["arrays"] = [(name, array.dtype.str, array.shape) for name, array in contiguous.items()]
            frames = [array.reshape(-1).view(np.uint8).data for array in contiguous.values()]
        elif entry.name == "items" and isinstance(message, Run):
            header["items"] = [{f.name: getattr(item, f.name) for f in fields(item)} for item in value]
        else:
            header[entry.name] = value
    return [json.dumps(header, separators=(",", ":")).encode(), *frames]


def decode(frames: Sequence[bytes | memoryview]) -> Message:
    """The message of `frames`; its arrays are read-only views of them.

    Raises:
        ProtocolError: it is none.
    """
    try:
        header = json.loads(bytes(frames[0]))
        kind = _TYPES[header.pop("type")]
        described = header.pop("arrays", None)
        if described is not None:
            if len(described) != len(frames) - 1:
                raise ValueError(f"{len(described)} arrays in {len(frames) - 1} frames")
            header["arrays"] = {
                name: np.frombuffer(frame, dtype=np.dtype(dtype)).reshape(shape)
                for (name, dtype, shape), frame in zip(described, frames[1:], strict=True)
            }
        if kind is Run:
            header["items"] = tuple(Item(**{**item, "seeds": tuple(item["seeds"])}) for item in header["items"])
        elif kind is Step:
            header["items"] = tuple(header["items"])
        return kind(**header)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"not a message of the diffusion engine: {error}") from error

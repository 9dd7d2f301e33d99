"""From a task to the arguments of a pipeline's call, with every value checked before anything is queued."""

from __future__ import annotations

import io
import itertools
import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import json_format
from PIL import Image, UnidentifiedImageError

from stagemesh.config import suggest
from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh_worker.engines.base import EngineInput
from stagemesh_worker.engines.diffusion.facts import PipelineFacts
from stagemesh_worker.engines.diffusion.media import FORMATS
from stagemesh_worker.engines.diffusion.options import DiffusionOptions

RESERVED = frozenset(
    {
        "prompt", "negative_prompt", "generator", "output_type", "return_dict", "latents", "batch_size",
        "callback", "callback_steps", "callback_on_step_end", "callback_on_step_end_tensor_inputs",
        "num_images_per_prompt", "num_waveforms_per_prompt", "num_videos_per_prompt",
    }
)  # fmt: skip
"""Arguments of a call that the engine sets itself: `extra` may not name them."""

MAX_INPUT_PIXELS = 64 << 20
"""Largest picture accepted as input: 64 Mi pixels, 192 MiB decoded."""

_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class DiffusionRequest:
    """One checked request."""

    prompt: str | None
    negative_prompt: str | None
    seeds: tuple[int, ...]
    """One per picture."""
    output_format: str
    preview_interval: int = 0
    call: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the pipeline's call but for prompts and seeds."""
    latents_out: bool = False
    lora: str | None = None
    lora_scale: float = 1.0
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    @property
    def batch_key(self) -> str | None:
        """Equal keys may share a call; None shares with nobody."""
        if self.arrays or self.prompt is None:
            return None
        shared = [
            self.call, len(self.seeds), self.negative_prompt is None, self.latents_out, self.lora, self.lora_scale,
        ]  # fmt: skip
        return json.dumps(shared, sort_keys=True)


def build_request(
    given: EngineInput,
    params: sampling_pb.DiffusionSamplingParams,
    facts: PipelineFacts,
    options: DiffusionOptions,
    *,
    lora: tuple[str, float] | None = None,
    latents_out: bool = False,
) -> DiffusionRequest:
    """Check a task's input and parameters against the loaded pipeline.

    Raises:
        MeshError: INVALID_REQUEST that names the field; UNSUPPORTED where this pipeline cannot do it at all.
    """
    arrays = _input_arrays(given, facts)
    prompt = _prompt(given, facts, arrays)
    call: dict[str, Any] = {
        name: value for name, value in options.diffusers_call_kwargs.items() if name not in RESERVED
    }
    images = _put_typed(call, params, facts, options)
    _put_extra(call, params, facts)
    _check_size(call, facts, options)
    negative = params.negative_prompt if params.HasField("negative_prompt") else (given.negative_text or None)
    if negative and "negative_prompt" not in facts.arguments:
        raise invalid("negative_prompt", negative, f"{facts.class_name} takes none")
    interval = params.preview_interval_steps
    if interval and not facts.previews:
        raise MeshError(
            Reason.UNSUPPORTED,
            f"preview_interval_steps: {facts.class_name} has no previews: its latents are not pictures",
            field="preview_interval_steps",
        )
    if lora is not None and not facts.lora:
        raise MeshError(Reason.UNSUPPORTED, f"lora: {facts.class_name} loads no LoRA adapters", field="lora")
    seed = params.seed if params.HasField("seed") else secrets.randbelow(1 << 32)
    return DiffusionRequest(
        prompt=prompt,
        negative_prompt=negative or None,
        seeds=tuple(_wrap_int64(seed + number) for number in range(images)),
        output_format=_output_format(params, facts),
        preview_interval=interval,
        call=call,
        latents_out=latents_out,
        lora=lora[0] if lora else None,
        lora_scale=lora[1] if lora else 1.0,
        arrays=arrays,
    )


# ------------------------------------------------------------------ parameters
_Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class _Typed:
    field: str
    arguments: tuple[str, ...]
    """Names that pipelines have for it, the first known one is used."""
    accepts: _Check
    right: str


_TYPED = (
    _Typed("num_inference_steps", ("num_inference_steps",), lambda v: v >= 1, "must be at least 1"),
    _Typed("guidance_scale", ("guidance_scale",), lambda v: 0 <= v <= 1000, "must be from 0 to 1000"),
    _Typed("height", ("height",), lambda v: v >= 1, "must be at least 1 pixel"),
    _Typed("width", ("width",), lambda v: v >= 1, "must be at least 1 pixel"),
    _Typed("num_frames", ("num_frames",), lambda v: 1 <= v <= 1024, "must be from 1 to 1024"),
    _Typed("audio_seconds", ("audio_length_in_s", "audio_end_in_s"), lambda v: 0 < v <= 600, "must be in (0, 600]"),
    _Typed("guidance_rescale", ("guidance_rescale",), lambda v: 0 <= v <= 1, "must be from 0 to 1"),
    _Typed("eta", ("eta",), lambda v: 0 <= v <= 1, "must be from 0 to 1"),
    _Typed("strength", ("strength",), lambda v: 0 < v <= 1, "must be in (0, 1]"),
)


def _put_typed(
    call: dict[str, Any],
    params: sampling_pb.DiffusionSamplingParams,
    facts: PipelineFacts,
    options: DiffusionOptions,
) -> int:
    """Put the typed parameters into `call`; returns the number of pictures."""
    for entry in _TYPED:
        if not params.HasField(entry.field):  # type: ignore[arg-type]
            continue
        value = _as_written(getattr(params, entry.field))
        if not math.isfinite(value) or not entry.accepts(value):
            raise invalid(entry.field, value, entry.right)
        argument = facts.first_of(*entry.arguments)
        if argument is None:
            raise invalid(entry.field, value, f"{facts.class_name} takes no {entry.arguments[0]}")
        call[argument] = value
    steps = call.get("num_inference_steps", 1)
    if steps > options.max_num_inference_steps:
        raise invalid("num_inference_steps", steps, f"this stage makes at most {options.max_num_inference_steps}")
    if params.timesteps:
        _put_timesteps(call, params, facts, options)
    images = params.num_images_per_prompt if params.HasField("num_images_per_prompt") else 1
    if not 1 <= images <= options.max_images_per_prompt:
        raise invalid("num_images_per_prompt", images, f"must be from 1 to {options.max_images_per_prompt}")
    argument = facts.first_of(*_COUNT_ARGUMENTS)
    if images > 1 and facts.takes_prompt and argument is None:
        raise invalid("num_images_per_prompt", images, f"{facts.class_name} makes one output per prompt")
    return images


_COUNT_ARGUMENTS = ("num_images_per_prompt", "num_waveforms_per_prompt", "num_videos_per_prompt")


def _put_timesteps(
    call: dict[str, Any],
    params: sampling_pb.DiffusionSamplingParams,
    facts: PipelineFacts,
    options: DiffusionOptions,
) -> None:
    timesteps = [_as_written(value) for value in params.timesteps]
    if "timesteps" not in facts.arguments:
        raise invalid("timesteps", timesteps, f"{facts.class_name} takes none")
    if len(timesteps) > options.max_num_inference_steps:
        raise invalid("timesteps", len(timesteps), f"this stage makes at most {options.max_num_inference_steps}")
    if any(not math.isfinite(value) or value < 0 for value in timesteps):
        raise invalid("timesteps", timesteps, "must be 0 or more")
    if any(later >= earlier for earlier, later in itertools.pairwise(timesteps)):
        raise invalid("timesteps", timesteps, "must fall from step to step")
    if params.HasField("num_inference_steps"):
        raise invalid("timesteps", timesteps, "give either timesteps or num_inference_steps")
    call.pop("num_inference_steps", None)
    call["timesteps"] = [int(value) if value.is_integer() else value for value in timesteps]


def _put_extra(call: dict[str, Any], params: sampling_pb.DiffusionSamplingParams, facts: PipelineFacts) -> None:
    extra = json_format.MessageToDict(params.extra)
    for name, value in extra.items():
        if name in RESERVED:
            raise invalid(f"extra.{name}", value, "the engine sets this argument itself")
        kind = facts.arguments.get(name)
        if kind is None:
            allowed = sorted(set(facts.arguments) - RESERVED)
            hint = suggest(name, allowed) or f"it takes {', '.join(allowed)}"
            raise invalid(f"extra.{name}", value, f"{facts.class_name} takes no such argument; {hint}")
        call[name] = _of_kind(f"extra.{name}", value, kind)


def _of_kind(path: str, value: Any, kind: str) -> Any:
    """`value`, from a Struct where every number is a float, as an argument of `kind`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and not math.isfinite(value):
        raise invalid(path, value, "must be a finite number")
    if kind == "int":
        if not number or not float(value).is_integer():
            raise invalid(path, value, "must be a whole number")
        return int(value)
    if kind == "float" and not number:
        raise invalid(path, value, "must be a number")
    if kind == "bool" and not isinstance(value, bool):
        raise invalid(path, value, "must be true or false")
    if kind == "str" and not isinstance(value, str):
        raise invalid(path, value, "must be a text")
    if kind == "any" and number and float(value).is_integer():
        return int(value)
    return value


def _check_size(call: dict[str, Any], facts: PipelineFacts, options: DiffusionOptions) -> None:
    # A size far beyond the model's own does not fail politely: it takes the process, and everybody's work, with it.
    native = facts.native_height * facts.native_width
    limit = options.max_pixels or 4 * native
    height, width = call.get("height", facts.native_height), call.get("width", facts.native_width)
    if native and call.keys() & {"height", "width"}:
        # Pipelines forget the one that was given when the other is missing.
        call["height"], call["width"] = height, width
    if limit and height * width > limit:
        field_name = "height" if height >= width else "width"
        raise invalid(field_name, call.get(field_name), f"{height} x {width} is more than {limit} pixels (max_pixels)")


def _output_format(params: sampling_pb.DiffusionSamplingParams, facts: PipelineFacts) -> str:
    known = FORMATS[facts.modality]
    chosen = params.output_format or known[0]
    if chosen not in known:
        raise invalid("output_format", chosen, f"an output of kind {facts.modality} is one of {', '.join(known)}")
    return chosen


def _as_written(value: float) -> float:
    """A float32 of the wire as the short decimal that was meant: 0.1, not 0.10000000149."""
    return value if isinstance(value, int) else float(str(np.float32(value)))


def _wrap_int64(seed: int) -> int:
    return (seed + _INT64) % (2 * _INT64) - _INT64


# ------------------------------------------------------------------ input
_TENSOR_ARGUMENTS = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")


def _prompt(given: EngineInput, facts: PipelineFacts, arrays: Mapping[str, Any]) -> str | None:
    if "prompt_embeds" in arrays or not facts.takes_prompt:
        return None
    if given.text is not None:
        return given.text
    if given.messages:
        return "\n".join(message["content"] for message in given.messages if message.get("role") != "system")
    if given.token_ids is not None:
        raise invalid("prompt.tokens", f"{len(given.token_ids)} ids", "a diffusion stage reads text or embeddings")
    raise invalid("prompt", None, "a diffusion stage needs a text")


def _input_arrays(given: EngineInput, facts: PipelineFacts) -> dict[str, np.ndarray[Any, Any]]:
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    if given.embeds is not None:
        arrays["prompt_embeds"] = _batched(np.asarray(given.embeds), 3)
    for name, value in given.tensors.items():
        if name in _TENSOR_ARGUMENTS:
            arrays[name] = _batched(np.asarray(value), 2 if "pooled" in name else 3)
        elif name == "latents":
            arrays[name] = _batched(np.asarray(value), 4)
        else:
            raise invalid(f"tensors.{name}", np.shape(value), f"known are latents, {', '.join(_TENSOR_ARGUMENTS)}")
    for place, media in enumerate(given.media):
        name = "image" if place == 0 else "mask_image"
        if place > 1:
            raise invalid("prompt.media", len(given.media), "a diffusion stage reads a picture and its mask")
        arrays[name] = _decode_image(f"prompt.media[{place}]", media)
    for name in arrays:
        if name not in facts.arguments:
            raise invalid(f"prompt ({name})", arrays[name].shape, f"{facts.class_name} takes no {name}")
    return arrays


def _batched(array: np.ndarray[Any, Any], dimensions: int) -> np.ndarray[Any, Any]:
    return array[np.newaxis] if array.ndim == dimensions - 1 else array


def _decode_image(path: str, media: prompt_pb.MediaInput) -> np.ndarray[Any, Any]:
    """The picture as uint8 [height, width, 3]."""
    if media.modality != "image":
        raise invalid(f"{path}.modality", media.modality, "a diffusion stage reads images")
    if media.WhichOneof("source") != "data":
        raise MeshError(Reason.UNSUPPORTED, f"{path}: give the picture's bytes in `data`", field=path)
    try:
        with Image.open(io.BytesIO(media.data)) as image:
            if image.width * image.height > MAX_INPUT_PIXELS:
                raise invalid(path, image.size, f"more than {MAX_INPUT_PIXELS} pixels")
            return np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise invalid(path, f"{len(media.data)} bytes", f"not a picture that can be read: {error}") from None

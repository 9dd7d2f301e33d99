"""One call of the pipeline, in the child: arguments, what happens at each step, what comes out."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from stagemesh_worker.engines.diffusion.facts import PipelineFacts
from stagemesh_worker.engines.diffusion.protocol import Run

OnStep = Callable[[int, int, Any], None]
"""Called after each step with the number done, the number in all and the latents, or None where they are not shown.
What it raises leaves the pipeline's call."""


@dataclass(frozen=True, slots=True)
class Made:
    """One output: uint8 [height, width, channels], uint8 [frames, height, width, channels], float32 [samples, channels]
    or a latent."""

    array: np.ndarray[Any, Any]
    flagged: bool
    """The pipeline's safety checker blanked it."""


class InvalidCallError(ValueError):
    """The pipeline refuses its arguments; `field` is the one it names."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def call_pipeline(pipe: DiffusionPipeline, facts: PipelineFacts, run: Run, on_step: OnStep) -> list[Made]:
    """Run the pipeline once for all items of `run`.

    Returns:
        One output for each seed of each item, in order.

    Raises:
        InvalidCallError: the pipeline refuses an argument.
        Exception: what `on_step` or the pipeline raised.
    """
    arguments = _arguments(pipe, facts, run)
    with _step_hook(pipe, facts, arguments, on_step), torch.inference_mode():
        try:
            result = pipe(**arguments)
        except (ValueError, TypeError) as error:
            raise _named(error, facts) from error
        finally:
            # A call that was left in the middle did not do this itself: offloaded models and caches start anew.
            pipe.maybe_free_model_hooks()
    outputs = list(_arrays(result, facts, latents_out=run.latents_out))
    flags = getattr(result, "nsfw_content_detected", None) or [False] * len(outputs)
    wanted = sum(len(item.seeds) for item in run.items)
    if len(outputs) != wanted:
        raise RuntimeError(f"{facts.class_name} made {len(outputs)} outputs for {wanted} seeds")
    return [Made(array, bool(flag)) for array, flag in zip(outputs, flags, strict=True)]


def decode_preview(pipe: DiffusionPipeline, latents: torch.Tensor, height: int, width: int) -> np.ndarray[Any, Any]:
    """Decode one latent [channels, h, w] (or packed [tokens, channels]) to uint8 [height, width, 3]."""
    latent = latents[None]
    if latent.ndim == 3:
        latent = pipe._unpack_latents(latent, height, width, pipe.vae_scale_factor)
    config = pipe.vae.config
    latent = latent / getattr(config, "scaling_factor", 1.0) + (getattr(config, "shift_factor", None) or 0.0)
    with torch.inference_mode():
        picture = pipe.vae.decode(latent.to(pipe.vae.dtype), return_dict=False)[0]
    return _to_uint8(pipe.image_processor.postprocess(picture, output_type="np")[0])


# ------------------------------------------------------------------ arguments
def _arguments(pipe: DiffusionPipeline, facts: PipelineFacts, run: Run) -> dict[str, Any]:
    arguments: dict[str, Any] = dict(run.call)
    per_item = len(run.items[0].seeds)
    arguments.update(_array_arguments(pipe, run, per_item))
    if facts.takes_prompt and "prompt_embeds" not in arguments:
        prompts = [item.prompt for item in run.items]
        arguments["prompt"] = prompts if facts.batches_prompts else prompts[0]
    if run.items[0].negative_prompt is not None:
        negatives = [item.negative_prompt for item in run.items]
        arguments["negative_prompt"] = negatives if "prompt" in arguments and facts.batches_prompts else negatives[0]
    count = facts.first_of("num_images_per_prompt", "num_waveforms_per_prompt", "num_videos_per_prompt")
    if count is not None:
        arguments[count] = per_item
    elif not facts.takes_prompt and "batch_size" in facts.arguments:
        arguments["batch_size"] = per_item
    if "generator" in facts.arguments:
        # On the CPU whatever the device is, and one for each picture: the noise depends on the seed alone.
        generators = [torch.Generator("cpu").manual_seed(seed) for item in run.items for seed in item.seeds]
        arguments["generator"] = generators if len(generators) > 1 else generators[0]
    if "output_type" in facts.arguments:
        arguments["output_type"] = "latent" if run.latents_out else "pil" if facts.modality == "image" else "np"
    return arguments


def _array_arguments(pipe: DiffusionPipeline, run: Run, per_item: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, array in run.arrays.items():
        if name in ("image", "mask_image"):
            picture = Image.fromarray(array)
            arguments[name] = picture.convert("L") if name == "mask_image" else picture
        else:
            dtype = pipe.dtype if np.issubdtype(array.dtype, np.floating) else None
            tensor = torch.from_numpy(array.copy()).to(pipe._execution_device, dtype=dtype)
            if name == "latents" and tensor.shape[0] == 1 and per_item > 1:
                tensor = tensor.repeat(per_item, *[1] * (tensor.ndim - 1))
            arguments[name] = tensor
    return arguments


# ------------------------------------------------------------------ steps
@contextlib.contextmanager
def _step_hook(
    pipe: DiffusionPipeline, facts: PipelineFacts, arguments: dict[str, Any], on_step: OnStep
) -> Iterator[None]:
    """Have `on_step` called after each step, in the way that this pipeline knows."""
    if "callback_on_step_end" in facts.arguments:

        def at_step_end(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            total = getattr(pipe, "_num_timesteps", 0) or len(pipe.scheduler.timesteps)
            on_step(step + 1, total, values.get("latents"))
            return values

        arguments["callback_on_step_end"] = at_step_end
        yield
        return
    # Older pipelines have `callback`, or nothing: all of them step their scheduler.
    scheduler, done = pipe.scheduler, 0
    original = scheduler.step

    @functools.wraps(original)  # the pipeline looks at its signature, to see which arguments the scheduler knows
    def step_and_tell(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        result = original(*args, **kwargs)
        done += 1
        on_step(done, max(done, len(scheduler.timesteps)), None)
        return result

    scheduler.step = step_and_tell
    try:
        yield
    finally:
        del scheduler.step


# ------------------------------------------------------------------ results
def _arrays(result: Any, facts: PipelineFacts, *, latents_out: bool) -> Iterator[np.ndarray[Any, Any]]:
    for name in ("images", "audios", "frames"):
        values = getattr(result, name, None)
        if values is not None:
            break
    else:
        raise RuntimeError(f"{facts.class_name} returned {type(result).__name__}: no images, audios or frames")
    for value in values:
        array = _to_numpy(value)
        if latents_out:
            yield array
        elif name == "audios":
            sound = array.astype(np.float32)
            yield sound[:, np.newaxis] if sound.ndim == 1 else sound.T
        else:
            yield _to_uint8(array)


def _to_numpy(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return np.asarray(value.float() if value.is_floating_point() else value)
    if isinstance(value, list):
        return np.stack([np.asarray(frame) for frame in value])
    return np.asarray(value)


def _to_uint8(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Pixels as uint8 with a channel axis; floats are in [0, 1]."""
    if array.dtype != np.uint8:
        array = (np.nan_to_num(array).clip(0.0, 1.0) * 255.0).round().astype(np.uint8)
    return array[:, :, np.newaxis] if array.ndim == 2 else array


def _named(error: Exception, facts: PipelineFacts) -> Exception:
    """The pipeline's complaint with the argument that it names, when it names one; else the error as it is."""
    for quoted in re.findall(r"[`'\"]([a-z_0-9]+)[`'\"]", str(error)):
        if quoted in facts.arguments:
            return InvalidCallError(str(error), quoted)
    return error


def items_alone(run: Run) -> list[Run]:
    """The same work, one item at a time."""
    return [replace(run, items=(item,)) for item in run.items]

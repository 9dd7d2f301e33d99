"""Loading a diffusers pipeline, in the child: weights, device, memory savings, caches; and the facts about it."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import deprecation_utils

from stagemesh.config import suggest
from stagemesh_worker.engines.base import EngineConfigError
from stagemesh_worker.engines.diffusion.facts import PipelineFacts
from stagemesh_worker.engines.diffusion.options import DiffusionOptions

LOAD_KWARGS = frozenset(
    {
        "custom_pipeline", "custom_revision", "variant", "use_safetensors", "low_cpu_mem_usage", "device_map",
        "max_memory", "offload_folder", "offload_state_dict", "disable_mmap", "trust_remote_code",
    }
)  # fmt: skip
"""What from_pretrained takes besides the components of the pipeline; others it drops with a warning, we refuse."""


_DTYPE = "dtype" if hasattr(deprecation_utils, "_TORCH_DTYPE_DEPRECATION_MESSAGE") else "torch_dtype"
"""Its name changed."""


def device_name(kind: str) -> str:
    """Torch's name of a device kind of ours; the visible-devices variable already left only our device."""
    return {"cpu": "cpu", "cuda": "cuda", "rocm": "cuda"}.get(kind, kind)


def load_pipeline(folder: str, device_kind: str, options: DiffusionOptions) -> DiffusionPipeline:
    """Load the pipeline in `folder` from the disk alone, on the device, with the memory options applied.

    Raises:
        EngineConfigError: the folder or an option does not fit.
    """
    device = device_name(device_kind)
    if options.enable_cpu_offload and device == "cpu":
        raise EngineConfigError("engine_args.enable_cpu_offload: has no meaning on a CPU: leave it out")
    kwargs = dict(options.diffusers_load_kwargs)
    _check_load_kwargs(folder, kwargs)
    kwargs[_DTYPE] = _dtype(options.dtype, device)
    if options.quantization_config:
        from diffusers import PipelineQuantizationConfig

        kwargs["quantization_config"] = _configured(
            "quantization_config", PipelineQuantizationConfig, options.quantization_config
        )
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True, **kwargs)
    pipe.set_progress_bar_config(disable=True)
    if options.enable_cpu_offload:
        pipe.enable_model_cpu_offload(device=device)
    elif "device_map" not in kwargs:
        pipe.to(device)
    _save_memory(pipe, options)
    _speed_up(pipe, options)
    return pipe


def describe(pipe: DiffusionPipeline) -> PipelineFacts:
    """The facts that the engine checks requests against."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    hints = _call_hints(pipe)
    arguments = {
        name: _kind(hints.get(name, Any))
        for name, parameter in parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    for name in ("timesteps", "sigmas"):
        if name in arguments and not _schedules(pipe, name):
            del arguments[name]
    modality = _modality(arguments)
    height, width = _native_size(pipe, parameters) if modality != "audio" else (0, 0)
    return PipelineFacts(
        class_name=type(pipe).__name__,
        version=diffusers.__version__,
        arguments=arguments,
        modality=modality,
        takes_prompt="prompt" in arguments,
        batches_prompts=list in _members(hints.get("prompt", Any)),
        native_height=height,
        native_width=width,
        previews=can_preview(pipe, arguments, modality),
        sample_rate_hz=_sample_rate(pipe) if modality == "audio" else 0,
        lora=hasattr(pipe, "load_lora_weights"),
    )


def can_preview(pipe: DiffusionPipeline, arguments: Mapping[str, str], modality: str) -> bool:
    """Whether the latents between steps are a VAE's [batch, channels, height, width], packed or not."""
    decodes = hasattr(getattr(pipe, "vae", None), "decode") and hasattr(pipe, "image_processor")
    return modality == "image" and decodes and "callback_on_step_end" in arguments


def denoiser(pipe: DiffusionPipeline) -> Any:
    """The network that is run once a step, or None."""
    return getattr(pipe, "transformer", None) or getattr(pipe, "unet", None)


# ------------------------------------------------------------------ options
def _dtype(name: str, device: str) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineConfigError(f"engine_args.dtype: {name!r}: must be float32, float16 or bfloat16")
    return dtype


def _check_load_kwargs(folder: str, kwargs: Mapping[str, Any]) -> None:
    index = json.loads((Path(folder) / "model_index.json").read_text())
    known = LOAD_KWARGS | {name for name in index if not name.startswith("_")}
    for name in kwargs:
        if name not in known:
            hint = suggest(name, known) or f"known are {', '.join(sorted(known))}"
            raise EngineConfigError(
                f"engine_args.diffusers_load_kwargs.{name}: {index.get('_class_name')} takes no such argument; {hint}"
            )


def _save_memory(pipe: DiffusionPipeline, options: DiffusionOptions) -> None:
    for option, method in (("vae_use_slicing", "enable_slicing"), ("vae_use_tiling", "enable_tiling")):
        if not getattr(options, option):
            continue
        enable = getattr(getattr(pipe, "vae", None), method, None)
        if enable is None:
            raise EngineConfigError(f"engine_args.{option}: the VAE of {type(pipe).__name__} cannot do it")
        enable()


def _speed_up(pipe: DiffusionPipeline, options: DiffusionOptions) -> None:
    network = denoiser(pipe)
    if options.attention_backend is not None:
        if not hasattr(network, "set_attention_backend"):
            raise EngineConfigError(f"engine_args.attention_backend: {type(network).__name__} has no backends")
        try:
            network.set_attention_backend(options.attention_backend)
        except (ValueError, RuntimeError, ImportError) as error:
            raise EngineConfigError(f"engine_args.attention_backend: {error}") from error
    if options.cache_backend == "cache_dit":
        _enable_cache_dit(pipe, options)
    elif options.cache_backend is not None:
        _enable_cache(network, options)


def cache_backends() -> dict[str, type]:
    """Caches of the installed diffusers by our names: FirstBlockCacheConfig is first_block_cache."""
    from diffusers import hooks

    found = {}
    for name in dir(hooks):
        if name.endswith("CacheConfig") or name == "PyramidAttentionBroadcastConfig":
            snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
            found[snake.removeprefix("_").removesuffix("_config")] = getattr(hooks, name)
    return found


def _enable_cache(network: Any, options: DiffusionOptions) -> None:
    backends = cache_backends()
    kind = backends.get(options.cache_backend or "")
    if kind is None:
        known = ", ".join(sorted([*backends, "cache_dit"]))
        raise EngineConfigError(f"engine_args.cache_backend: {options.cache_backend!r}: known are {known}")
    if not hasattr(network, "enable_cache"):
        raise EngineConfigError(
            f"engine_args.cache_backend: {type(network).__name__} cannot reuse features between steps"
        )
    try:
        network.enable_cache(_configured("cache_config", kind, options.cache_config))
    except (ValueError, NotImplementedError) as error:
        raise EngineConfigError(f"engine_args.cache_backend: {error}") from error


def _enable_cache_dit(pipe: DiffusionPipeline, options: DiffusionOptions) -> None:
    try:
        import cache_dit  # type: ignore[import-not-found]
    except ImportError:
        raise EngineConfigError(
            "engine_args.cache_backend: cache_dit is not installed: pip install cache-dit"
        ) from None
    config = _configured("cache_config", cache_dit.DBCacheConfig, options.cache_config)
    try:
        cache_dit.enable_cache(pipe, cache_config=config)
    except (ValueError, AssertionError) as error:
        raise EngineConfigError(f"engine_args.cache_backend: {error}") from error


def _configured(option: str, kind: type, given: Mapping[str, Any]) -> Any:
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise EngineConfigError(f"engine_args.{option}: {error}") from error


# ------------------------------------------------------------------ facts
def _schedules(pipe: DiffusionPipeline, argument: str) -> bool:
    """Whether the pipeline's scheduler takes custom `timesteps` or `sigmas`: the pipeline's call takes them anyhow."""
    set_timesteps = getattr(getattr(pipe, "scheduler", None), "set_timesteps", None)
    return set_timesteps is not None and argument in inspect.signature(set_timesteps).parameters


def _call_hints(pipe: DiffusionPipeline) -> dict[str, Any]:
    try:
        return typing.get_type_hints(inspect.unwrap(type(pipe).__call__))
    except (NameError, TypeError):  # a pipeline from a file of its own may name types that are not there
        return {}


def _members(hint: Any) -> set[Any]:
    """The types of a union, without None; lists and dicts as such."""
    arguments = typing.get_args(hint) if typing.get_origin(hint) not in (list, dict, tuple) else ()
    return {typing.get_origin(member) or member for member in arguments or (hint,)} - {type(None)}


def _kind(hint: Any) -> str:
    names = {getattr(member, "__name__", "any") for member in _members(hint)}
    if names == {"int", "float"}:
        return "float"
    return next(iter(names)) if len(names) == 1 and names <= {"int", "float", "bool", "str"} else "any"


def _modality(arguments: Mapping[str, str]) -> str:
    if arguments.keys() & {"audio_length_in_s", "audio_end_in_s", "num_waveforms_per_prompt", "audio_duration"}:
        return "audio"
    return "video" if "num_frames" in arguments or "num_videos_per_prompt" in arguments else "image"


def _native_size(pipe: DiffusionPipeline, parameters: Mapping[str, inspect.Parameter]) -> tuple[int, int]:
    """Height and width in pixels that a call makes when it is not told; zeros when nobody says."""
    height, width = (parameters[name].default if name in parameters else None for name in ("height", "width"))
    if isinstance(height, int) and isinstance(width, int):
        return height, width
    size = getattr(pipe, "default_sample_size", None)
    if size is None:
        size = getattr(getattr(denoiser(pipe), "config", None), "sample_size", None)
    scale = getattr(pipe, "vae_scale_factor", 1)
    if isinstance(size, int):
        return size * scale, size * scale
    if isinstance(size, list | tuple) and len(size) == 2:
        return size[0] * scale, size[1] * scale
    return 0, 0


def _sample_rate(pipe: DiffusionPipeline) -> int:
    for name in ("vocoder", "vae", "mel", "unet"):
        config = getattr(getattr(pipe, name, None), "config", None)
        for key in ("sampling_rate", "sample_rate"):
            rate = getattr(config, key, None)
            if isinstance(rate, int) and rate > 0:
                return rate
    return 0

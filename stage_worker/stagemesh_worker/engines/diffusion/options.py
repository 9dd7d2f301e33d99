"""What `engine_args` of a diffusion stage may say."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stagemesh.config import suggest
from stagemesh_worker.engines.base import EngineConfigError

DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class DiffusionOptions:
    """Settings of the diffusion engine; each field is a key of `engine_args`."""

    dtype: str = "auto"
    """Type of the weights: float32, float16, bfloat16; auto is bfloat16 on an accelerator and float32 on a CPU."""
    max_num_seqs: int = 1
    """Most pictures in one call of the pipeline: compatible requests share a call up to it."""
    batch_wait_ms: float = 10.0
    """How long a request waits for others to share its call with, in milliseconds."""
    max_pixels: int = 0
    """Largest height x width of a request; 0 is four times the model's own size."""
    max_num_inference_steps: int = 1000
    """Most denoising steps of a request."""
    max_images_per_prompt: int = 16
    """Most pictures of a request."""
    vae_use_slicing: bool = False
    """Decode the pictures of a batch one after the other: less memory."""
    vae_use_tiling: bool = False
    """Decode a picture in tiles: less memory for large pictures."""
    enable_cpu_offload: bool = False
    """Keep each model of the pipeline in host memory while it is not used. Needs an accelerator."""
    attention_backend: str | None = None
    """A backend of diffusers' attention dispatcher, such as "native" or "flash"."""
    cache_backend: str | None = None
    """Reuse of features between steps: a cache of diffusers (first_block_cache, mag_cache, ...) or cache_dit."""
    cache_config: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of that cache."""
    quantization_config: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of diffusers' PipelineQuantizationConfig."""
    lora_path: str | None = None
    """A LoRA adapter that is always on: file or folder."""
    lora_scale: float = 1.0
    """Its weight."""
    diffusers_load_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of DiffusionPipeline.from_pretrained."""
    diffusers_call_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of every call of the pipeline, below those of the request."""

    @classmethod
    def parse(cls, engine_args: Mapping[str, Any], path: str = "engine_args") -> DiffusionOptions:
        """Check `engine_args`.

        Args:
            path: where they stand in the pipeline file, for the error.

        Raises:
            EngineConfigError: an unknown name, a wrong type or a value out of range.
        """
        hints = typing.get_type_hints(cls)
        unknown = [name for name in engine_args if name not in hints]
        if unknown:
            hint = suggest(unknown[0], hints) or f"known are {', '.join(sorted(hints))}"
            raise EngineConfigError(f"{path}.{unknown[0]}: unknown; {hint}")
        values = {name: _typed(f"{path}.{name}", value, hints[name]) for name, value in engine_args.items()}
        options = cls(**values)
        options._check_ranges(path)
        return options

    def _check_ranges(self, path: str) -> None:
        def refuse(name: str, problem: str) -> None:
            raise EngineConfigError(f"{path}.{name}: {getattr(self, name)!r}: {problem}")

        if self.dtype not in DTYPES:
            refuse("dtype", f"must be one of {', '.join(DTYPES)}")
        for name in ("max_num_seqs", "max_num_inference_steps", "max_images_per_prompt"):
            if getattr(self, name) < 1:
                refuse(name, "must be at least 1")
        if not 0 <= self.batch_wait_ms <= 60_000:
            refuse("batch_wait_ms", "must be from 0 to 60000 milliseconds")
        if self.max_pixels < 0:
            refuse("max_pixels", "must be 0 (four times the model's own size) or more")
        if self.cache_config and self.cache_backend is None:
            refuse("cache_config", "has no meaning without cache_backend")
        if self.lora_path is not None and not Path(self.lora_path).exists():
            refuse("lora_path", "no such file or folder")

    def to_json(self) -> dict[str, Any]:
        """As it goes to the child."""
        return asdict(self)


def _typed(path: str, value: Any, hint: Any) -> Any:
    """`value` when it is of type `hint`; an int is a float too.

    Raises:
        EngineConfigError: it is of another type.
    """
    wanted = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in wanted:
        kind = typing.get_origin(kind) or kind
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind is int and isinstance(value, bool):
            continue
        if isinstance(value, kind):
            if isinstance(value, Mapping):
                try:
                    json.dumps(dict(value))
                except (TypeError, ValueError) as error:
                    raise EngineConfigError(f"{path}: must hold plain values: {error}") from None
                return dict(value)
            return value
    names = " or ".join("nothing" if kind is type(None) else _KIND_NAMES.get(kind, "a mapping") for kind in wanted)
    raise EngineConfigError(f"{path}: {value!r}: must be {names}")


_KIND_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}

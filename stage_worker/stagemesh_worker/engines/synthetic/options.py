"""The `engine_args` of a synthetic stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from stagemesh.config import suggest
from stagemesh_worker.engines.base import EngineConfigError

OUTPUTS = ("text", "image", "audio", "tensor")


@dataclass(frozen=True, slots=True)
class SyntheticOptions:
    """Every option has a default, so that a stage needs none."""

    output: str = ""
    """"text", "image", "audio" or "tensor"; empty: what the stage's `final_output_type` says."""
    tokens_per_second: float = 0.0
    """Tokens of each task a second; 0 is as fast as possible."""
    first_token_delay_s: float = 0.0
    """Seconds before a task's first output."""
    tokens: int = 100
    """Tokens of an output that neither `max_tokens` nor a stop text ends, from 1."""
    max_num_seqs: int = 0
    """Tasks it works on at once; 0 is no bound. Others wait in order of priority."""
    image_size: int = 64
    """Pixels of each side of an image, 1 to 4096."""
    steps: int = 4
    """Steps of an image where the request says none, from 1."""
    step_seconds: float = 0.0
    """Seconds of each image step."""
    audio_seconds: float = 0.25
    """Seconds of sound per piece of input."""
    sample_rate_hz: int = 16_000
    tensor_shape: tuple[int, ...] = (16, 64)
    """Shape of the float32 tensor named "hidden_states"."""
    start_seconds: float = 0.0
    """Seconds that `start` takes."""
    crash_on_start: str = ""
    """Error text with which `start` fails; empty: it does not."""
    fail_on: str = ""
    """A task whose prompt contains this text fails; empty: none does."""
    die_after: int = 0
    """The engine dies when it has made so many tokens and steps; 0: never."""
    stall_after: int = 0
    """The engine stops stepping when it has made so many tokens and steps; 0: never."""

    @classmethod
    def parse(cls, engine_args: Mapping[str, Any]) -> SyntheticOptions:
        """Check a stage's `engine_args`.

        Raises:
            EngineConfigError: unknown name (with a did-you-mean), wrong type or value out of range.
        """
        known = {item.name: item for item in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in engine_args.items():
            if name not in known:
                hint = suggest(name, known) or f"want one of {', '.join(known)}"
                raise EngineConfigError(f"engine_args.{name}: unknown; {hint}")
            values[name] = _convert(name, value, known[name].default)
        options = cls(**values)
        options._check()
        return options

    def _check(self) -> None:
        if self.output and self.output not in OUTPUTS:
            raise EngineConfigError(f"engine_args.output: {self.output!r}: want one of {', '.join(OUTPUTS)}")
        for name, low in (("tokens", 1), ("steps", 1), ("image_size", 1), ("sample_rate_hz", 1)):
            if getattr(self, name) < low:
                raise EngineConfigError(f"engine_args.{name}: {getattr(self, name)}: want {low} or more")
        if self.image_size > 4096:
            raise EngineConfigError(f"engine_args.image_size: {self.image_size}: want 4096 or less")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (int, float)) and value < 0:
                raise EngineConfigError(f"engine_args.{item.name}: {value}: want 0 or more")


def _convert(name: str, value: Any, default: Any) -> Any:
    """`value` in the type of `default`."""
    if isinstance(default, tuple):
        if isinstance(value, (list, tuple)) and all(type(item) is int and item > 0 for item in value):
            return tuple(value)
        raise EngineConfigError(f"engine_args.{name}: {value!r}: want a list of whole numbers above 0")
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        wanted = {float: "a number", int: "a whole number", str: "a text"}[type(default)]
        raise EngineConfigError(f"engine_args.{name}: {value!r}: want {wanted}")
    return value

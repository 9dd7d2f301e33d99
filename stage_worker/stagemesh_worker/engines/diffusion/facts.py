"""What the engine must know of the loaded pipeline, so that it can check requests without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """Facts about a loaded pipeline, sent once by the child."""

    class_name: str
    version: str
    """Version of diffusers."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the pipeline's call that a request may set: name -> kind ("int", "float", "bool", "str", "any")."""
    modality: str = "image"
    """"image", "audio" or "video"."""
    takes_prompt: bool = True
    batches_prompts: bool = True
    """The pipeline's call takes a list of prompts, so that requests can share it."""
    native_height: int = 0
    """Pixels when nothing is asked; 0 when unknown."""
    native_width: int = 0
    previews: bool = False
    """Its latents can be decoded between steps."""
    sample_rate_hz: int = 0
    """Of its sound."""
    lora: bool = False
    """It can load LoRA adapters."""

    def first_of(self, *names: str) -> str | None:
        """The first of `names` that is an argument of the pipeline."""
        return next((name for name in names if name in self.arguments), None)

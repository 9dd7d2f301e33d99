"""LoRA adapters of the loaded pipeline, in the child: loaded once, switched per call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from diffusers import DiffusionPipeline

from stagemesh_worker.engines.base import EngineConfigError

ALWAYS_ON = "always-on"
"""Name of the adapter of `engine_args.lora_path`; no entry of `lora_modules` takes part in it."""


class AdapterError(ValueError):
    """An adapter is not known or cannot be loaded."""


class LoraAdapters:
    """Adapters by the names of the stage's allow-list.

    Args:
        allowed: name -> file or folder.
    """

    def __init__(self, pipe: DiffusionPipeline, allowed: Mapping[str, str]) -> None:
        self._pipe = pipe
        self._allowed = dict(allowed)
        self._loaded: set[str] = set()
        self._always: tuple[str, float] | None = None
        self._active: dict[str, float] = {}

    def load_always_on(self, path: str, scale: float) -> None:
        """Load the adapter that every call has.

        Raises:
            EngineConfigError: the pipeline cannot load it.
        """
        try:
            self._load(ALWAYS_ON, path)
        except AdapterError as error:
            raise EngineConfigError(f"engine_args.lora_path: {error}") from error
        self._always = (ALWAYS_ON, scale)
        self.use(None)

    def load(self, name: str) -> None:
        """Load an adapter of the allow-list; nothing happens when it is there.

        Raises:
            AdapterError: it is not on the list or does not fit the model.
        """
        if name in self._loaded:
            return
        if name not in self._allowed:
            known = ", ".join(sorted(self._allowed)) or "none"
            raise AdapterError(f"{name!r} is not one of the stage's lora_modules ({known})")
        self._load(name, self._allowed[name])
        self._apply(self._active)  # loading made it active

    def unload(self, name: str) -> bool:
        """Drop an adapter's weights; False when it was not loaded."""
        if name not in self._loaded or name == ALWAYS_ON:
            return False
        self._pipe.delete_adapters(name)
        self._loaded.discard(name)
        self._apply({kept: scale for kept, scale in self._active.items() if kept != name})
        return True

    def names(self) -> list[str]:
        """Loaded adapters."""
        return sorted(self._loaded - {ALWAYS_ON})

    def use(self, name: str | None, scale: float = 1.0) -> None:
        """Make the next call use `name` (and what is always on), loading it when needed.

        Raises:
            AdapterError: as `load`.
        """
        wanted = dict([self._always] if self._always else [])
        if name is not None:
            self.load(name)
            wanted[name] = scale
        if wanted != self._active:
            self._apply(wanted)

    def _load(self, name: str, path: str) -> None:
        if not hasattr(self._pipe, "load_lora_weights"):
            raise AdapterError(f"{type(self._pipe).__name__} loads no LoRA adapters")
        location = Path(path)
        if not location.exists():
            raise AdapterError(f"{path}: no such file or folder")
        kwargs = {"weight_name": location.name} if location.is_file() else {}
        folder = location.parent if location.is_file() else location
        try:
            self._pipe.load_lora_weights(str(folder), adapter_name=name, local_files_only=True, **kwargs)
        except Exception as error:  # whatever a strange file makes diffusers and PEFT raise
            raise AdapterError(f"{path}: {error}") from error
        self._loaded.add(name)

    def _apply(self, wanted: Mapping[str, float]) -> None:
        self._active = dict(wanted)
        if wanted:
            self._pipe.enable_lora()
            self._pipe.set_adapters(list(wanted), list(wanted.values()))
        elif self._loaded:
            self._pipe.disable_lora()

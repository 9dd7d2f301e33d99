"""Tiny pipelines on disk, made once a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny pipeline, by the `make_..._pipeline` that makes it; or "lora", for "image"."""
    import tiny_models

    root = tmp_path_factory.mktemp("tiny")

    def folder(kind: str) -> Path:
        path = root / kind
        if not path.exists():
            if kind == "lora":
                tiny_models.make_lora(folder("image"), path)
            else:
                getattr(tiny_models, f"make_{kind}_pipeline")(path)
        return path

    return folder

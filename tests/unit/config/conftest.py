from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

FILES = Path(__file__).resolve().parents[2] / "data/pipelines"


@pytest.fixture(autouse=True)
def _adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dotted paths in the files lead into their own folder."""
    monkeypatch.syspath_prepend(FILES)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write a pipeline file and return its path."""

    def write(text: str, name: str = "pipeline.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write

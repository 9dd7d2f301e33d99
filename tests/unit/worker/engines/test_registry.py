"""Engines by name, and by the path of an operator's own class."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagemesh_worker.engines import EngineConfigError, engine_class, engine_names
from stagemesh_worker.engines.synthetic.engine import SyntheticEngine

MODULE = "stagemesh_worker.engines.synthetic.engine"
CODE = """
from stagemesh_worker.engines.synthetic.engine import SyntheticEngine
class Own(SyntheticEngine): ...
nothing = 1
"""


def test_engine_by_name_and_by_path(tmp_path: Path) -> None:
    (tmp_path / "own_engine.py").write_text(CODE)
    assert engine_class("synthetic") is engine_class(f"{MODULE}:SyntheticEngine") is SyntheticEngine
    assert issubclass(engine_class(f"{tmp_path}/own_engine.py:Own"), SyntheticEngine)
    assert {"vllm", "diffusion", "synthetic"} <= set(engine_names())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("synthetik", "did you mean synthetic"),
        ("{folder}/missing.py:Own", "there is no file"),
        ("{folder}/own_engine.py:Owm", "has no 'Owm'"),
        ("{folder}/own_engine.py:nothing", "1 is not a subclass"),
        ("{folder}/broken.py:Own", "SyntaxError"),
        ("not_installed.engines:Own", "not_installed"),
    ],
)
def test_engine_that_is_none(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "own_engine.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("def (:\n")
    with pytest.raises(EngineConfigError, match=says):
        engine_class(name.format(folder=tmp_path))

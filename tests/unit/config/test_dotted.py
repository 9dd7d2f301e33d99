"""Dotted paths are followed without importing anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stagemesh.config import ConfigError
from stagemesh.config.dotted import NotHere, check_dotted

MODULE = """
from __future__ import annotations
import os.path as paths
raise SystemExit("this module must not be run")
def function(): ...
async def coroutine(): ...
class Adapter: ...
constant: int = 1
first, second = 1, 2
if True:
    def conditional(): ...
try:
    from elsewhere import something as renamed
except ImportError:
    fallback = None
"""


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "operators_package/inner"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise SystemExit('this package must not be run')\n")
    (package / "adapters.py").write_text(MODULE)
    (package / "lazy.py").write_text("def __getattr__(name): ...\n")
    (package / "starred.py").write_text("from operators_package.inner.adapters import *\n")
    (package / "broken.py").write_text("def (:\n")
    (tmp_path / "namespace_only/deep").mkdir(parents=True)
    (tmp_path / "namespace_only/deep/module.py").write_text("def function(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "dotted",
    [
        *(f"operators_package.inner.adapters.{name}" for name in (
            "function", "coroutine", "Adapter", "constant", "second", "conditional", "renamed", "fallback", "paths",
        )),
        "operators_package.inner.adapters:function",
        "operators_package.inner.lazy.anything",
        "operators_package.inner.starred.anything",
        "operators_package.inner.broken.anything",
        "operators_package.inner.adapters",
        "namespace_only.deep.module.function",
        "math.sqrt",
        "os.path.join",
    ],
)  # fmt: skip
def test_paths_that_lead_somewhere(dotted: str) -> None:
    check_dotted(dotted, "input_adapter")
    assert "operators_package" not in sys.modules


@pytest.mark.parametrize(
    ("dotted", "says"),
    [
        ("operators_package.inner.adapters.functoin", "has no 'functoin'; did you mean function?"),
        ("operators_package.iner.adapters.function", "there is no module 'operators_package.iner' here"),
        (
            "operators_package.inner.adapters.deeper.function",
            "no module 'operators_package.inner.adapters.deeper' here",
        ),
        ("function", "want `package.module.function`"),
        ("operators_package..function", "want `package.module.function`"),
        ("../adapters.py", "want `package.module.function`"),
        ("", "want `package.module.function`"),
    ],
)
def test_paths_that_lead_nowhere(dotted: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_dotted(dotted, "input_adapter")
    assert says in str(caught.value) and not isinstance(caught.value, NotHere)


def test_package_that_is_not_installed_may_be_elsewhere() -> None:
    with pytest.raises(NotHere, match=r"there is no module 'not_installed' here; built-in ones are chat, text"):
        check_dotted("not_installed.chat", "input_adapter", ("chat", "text"))

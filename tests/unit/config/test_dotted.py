"""Dotted paths are followed without importing anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stagemesh.config import ConfigError
from stagemesh.config.dotted import NotHere, check_dotted, import_dotted

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
        ("function", "want `package.module.name` or `file.py:name`"),
        ("operators_package..function", "want `package.module.name` or `file.py:name`"),
        ("../adapters.py", "want `package.module.name` or `file.py:name`"),
        ("", "want `package.module.name` or `file.py:name`"),
    ],
)
def test_paths_that_lead_nowhere(dotted: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_dotted(dotted, "input_adapter")
    assert says in str(caught.value) and not isinstance(caught.value, NotHere)


def test_package_that_is_not_installed_may_be_elsewhere() -> None:
    with pytest.raises(NotHere, match=r"there is no module 'not_installed' here; built-in ones are chat, text"):
        check_dotted("not_installed.chat", "input_adapter", ("chat", "text"))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder with a file of code and its neighbour."""
    folder = tmp_path / "beside the pipeline"
    folder.mkdir()
    (folder / "neighbour_of_own.py").write_text("ANSWER = 42\n")
    (folder / "own.py").write_text("from neighbour_of_own import ANSWER\ndef adapter(): return ANSWER\n")
    return folder


def test_name_in_a_file_is_checked_without_running_it_and_imported_with_its_neighbours(code: Path) -> None:
    dotted = f"{code}/own.py:adapter"
    check_dotted(dotted, "input_adapter")
    assert f"{code}/own.py" not in sys.modules
    assert import_dotted(dotted)() == 42
    assert import_dotted(dotted) is import_dotted(dotted)
    assert import_dotted("math:sqrt") is import_dotted("math.sqrt")


def test_files_of_one_name_in_two_folders_are_two_modules(code: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def adapter(): return 'the other'\n")
    assert import_dotted(f"{code}/own.py:adapter")() == 42
    assert import_dotted(f"{tmp_path}/own.py:adapter")() == "the other"


def test_file_or_name_in_it_that_is_not_there(code: Path) -> None:
    for dotted, says in [
        (f"{code}/missing.py:adapter", "there is no file"),
        (f"{code}/own.py:adaptor", "has no 'adaptor'"),
    ]:
        with pytest.raises(ConfigError, match=says):
            check_dotted(dotted, "input_adapter")
        with pytest.raises(ImportError, match=says):
            import_dotted(dotted)


def test_file_whose_code_fails_is_not_half_imported(code: Path) -> None:
    (code / "own.py").write_text("begun = True\nraise RuntimeError('no licence')\n")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no licence"):
            import_dotted(f"{code}/own.py:begun")

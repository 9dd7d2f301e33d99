"""Paths of the operator's own code: `package.module.name` of what is installed, or `file.py:name`.

They are checked without running any of it, since an import may take seconds, and imported where they are used.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from stagemesh.config.errors import ConfigError, suggest

Made = TypeVar("Made")
_IN_FILE = re.compile(r"(.+\.py):([^\W\d]\w*)")


class NotHere(ConfigError):
    """The package of a dotted path is not installed on this machine; it may be on others."""


def code_file(dotted: str) -> tuple[str, str] | None:
    """File and name of the form `file.py:name`; None for a dotted path."""
    match = _IN_FILE.fullmatch(dotted)
    return (match[1], match[2]) if match else None


def import_dotted(dotted: str) -> Any:
    """Import what a path names. A file's neighbours can be imported by it, as in a script.

    Raises:
        ImportError: there is no such module, file or name.
        Exception: whatever its code raises.
    """
    in_file = code_file(dotted)
    if in_file is None:
        name, _, attribute = dotted.replace(":", ".").rpartition(".")
        module = importlib.import_module(name)
    else:
        attribute, module = in_file[1], _module_of(Path(in_file[0]))
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ImportError(f"module {in_file[0] if in_file else name} has no {attribute!r}") from None


def call_foreign(function: Callable[..., Made], *args: Any) -> Made:
    """Call the operator's own code on behalf of one request: whatever it raises, it is this call that fails.

    A time limit of its own is not ours, a cancellation of its own cancels nothing, and `sys.exit` ends no process.

    Raises:
        Exception: what the code raised; RuntimeError that names it where that would be taken for another's word.
    """
    try:
        return function(*args)
    except (TimeoutError, StopIteration) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _module_of(file: Path) -> ModuleType:
    # Under its whole path: two pipelines may both have an `adapters.py`.
    name = str(file)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no file {file} here")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def check_dotted(dotted: str, path: str, names: Sequence[str] = ()) -> None:
    """Check that a path (`package.module.name`, `package.module:name` or `file.py:name`) leads somewhere.

    Args:
        names: built-in names that may stand in its place, for the hint.

    Raises:
        NotHere: no package of that name is installed here.
        ConfigError: it is no dotted path, or leads nowhere.
    """
    in_file = code_file(dotted)
    if in_file is not None:
        _check_file(Path(in_file[0]), in_file[1], path, dotted)
        return
    module, _, attribute = dotted.replace(":", ".").rpartition(".")
    hint = suggest(dotted, names) or (f"built-in ones are {', '.join(names)}" if names else "")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ConfigError("want `package.module.name` or `file.py:name`", path=path, value=dotted, hint=hint)
    spec: ModuleSpec | None = None
    search: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = _spec(name, search)
        if spec is None:
            kind = NotHere if depth == 1 else ConfigError
            raise kind(f"there is no module {name!r} here", path=path, value=dotted, hint=hint)
        search = _inside(spec, parts[depth - 1], search)
    assert spec is not None
    found = _names_in(spec.origin)
    if found is not None and attribute not in found and _spec(f"{module}.{attribute}", search) is None:
        problem = f"module {module!r} has no {attribute!r}"
        raise ConfigError(problem, path=path, value=dotted, hint=suggest(attribute, found))


def _spec(name: str, search: Sequence[str] | None) -> ModuleSpec | None:
    """As `find_spec`, which would import the packages above a module."""
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__spec__ is not None:
        return loaded.__spec__
    try:
        if search is None:
            return importlib.util.find_spec(name)
        return PathFinder.find_spec(name, search) if search else None
    except KeyError:  # a package without __init__.py inside another, which its own finder would have to import
        return ModuleSpec(name, None, is_package=True)
    except (ImportError, ValueError):
        return None


def _inside(spec: ModuleSpec, name: str, search: Sequence[str] | None) -> list[str]:
    """Folders that a package's modules are in; none for a plain module."""
    if spec.submodule_search_locations is None:
        return []
    if spec.origin is not None:
        return list(spec.submodule_search_locations)
    # A package without __init__.py: its own list of folders cannot be read before the packages above are imported.
    return [str(folder) for base in search or sys.path if (folder := Path(base or ".", name)).is_dir()]


def _check_file(file: Path, attribute: str, path: str, dotted: str) -> None:
    if not file.is_file():
        raise ConfigError(f"there is no file {file} here", path=path, value=dotted)
    found = _names_in(str(file))
    if found is not None and attribute not in found:
        raise ConfigError(f"{file.name} has no {attribute!r}", path=path, value=dotted, hint=suggest(attribute, found))


def _names_in(source: str | None) -> set[str] | None:
    """What a module binds at its top level; None where the source does not tell."""
    if not source or not source.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(source).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in _statements(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.With):
            bound = (part for part in ast.walk(node) if isinstance(part, ast.Name))
            names.update(part.id for part in bound if isinstance(part.ctx, ast.Store))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    # Neither a star import nor a module's own __getattr__ can be known without running it.
    return None if names & {"*", "__getattr__"} else names


def _statements(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """Top-level statements, those inside `if` and `try` among them."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, inner, ()))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)

"""Load: a YAML file as plain data that knows its lines, with OmegaConf's interpolations resolved."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stagemesh.config.errors import ConfigError
from stagemesh.config.origins import Origin, Origins, Path, Tree, show_path

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 50_000
"""Values of one file, aliases counted where they are used: an alias of an alias of an alias grows without end."""
OPEN = "???"
"""OmegaConf's mark for a value that somebody must fill in."""


class PipelineLoader(yaml.SafeLoader):
    """YAML as people write it today: 1e-3 is a number, and a date is a text."""


class PipelineDumper(yaml.SafeDumper):
    """Writes what `PipelineLoader` reads back."""


_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+")
for _kind in (PipelineLoader, PipelineDumper):
    _kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def read_tree(file: FilePath) -> Tree:
    """Read one file. Raises ConfigError that names the file and, where YAML itself is broken, the line."""
    name = str(file)
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"is larger than {MAX_FILE_BYTES >> 20} MiB: that is no pipeline file", file=name)
        text = raw.decode()
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text", file=name) from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}", file=name) from None
    return parse_tree(text, name)


def parse_tree(text: str, name: str) -> Tree:
    """The same for a text. Raises ConfigError."""
    try:
        loader = PipelineLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                raise ConfigError("is empty", file=name, hint="a pipeline file is a mapping with `stages`")
            lines = _lines_of(node, name)
            plain = loader.construct_document(node)
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        raise _yaml_error(error, text, name) from None
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"not YAML: {_one_line(error)}", file=name) from None
    if not isinstance(plain, dict):
        raise ConfigError("is not a mapping", file=name, value=plain, hint="a pipeline file is a mapping with `stages`")
    # Most files interpolate nothing, and OmegaConf's own tree costs ten times the parsing.
    data = _interpolated(plain, name) if "${" in text else plain
    origins = Origins({path: Origin(name, line) for path, line in lines.items()})
    return Tree({str(key): _plain(value, (str(key),), origins) for key, value in data.items()}, origins)


def _interpolated(plain: dict[Any, Any], name: str) -> dict[Any, Any]:
    try:
        data = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError, AttributeError, KeyError) as error:
        path = str(getattr(error, "full_key", None) or "")
        raise ConfigError(_one_line(str(error).partition("\n")[0] or error), file=name, path=path) from None
    assert isinstance(data, dict)
    return data


def _plain(value: Any, path: Path, origins: Origins) -> Any:
    """Only what JSON has, with text keys: the pipeline travels to the workers as JSON. Raises ConfigError."""
    if isinstance(value, dict):
        return {str(key): _plain(item, (*path, str(key)), origins) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, (*path, index), origins) for index, item in enumerate(value)]
    if value == OPEN:
        problem = "is left open"
        raise ConfigError(problem, file=str(origins[path]), path=show_path(path), value=value, hint="fill it in")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError("want a finite number", file=str(origins[path]), path=show_path(path), value=value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    want = "want a text, a number, true, false, null, a list or a mapping"
    raise ConfigError(want, file=str(origins[path]), path=show_path(path), value=value)


def _lines_of(root: yaml.Node, name: str) -> dict[Path, int]:
    """Line of each value, from 1. Also bounds what aliases may grow to, before anything is built from it."""
    found: dict[Path, int] = {}

    def visit(node: yaml.Node, path: Path, line: int) -> None:
        found[path] = line
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"is nested deeper than {MAX_DEPTH} levels", file=f"{name}:{line}")
        if len(found) > MAX_NODES:
            raise ConfigError(f"has more than {MAX_NODES} values", file=f"{name}:{line}")
        if isinstance(node, yaml.MappingNode):
            for key, value, key_line in _pairs(node, name):
                visit(value, (*path, key), key_line)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                visit(item, (*path, index), item.start_mark.line + 1)

    visit(root, (), root.start_mark.line + 1)
    return found


def _pairs(node: yaml.MappingNode, name: str) -> Iterator[tuple[str, yaml.Node, int]]:
    seen: dict[str, int] = {}
    for key, value in node.value:
        # A key that is no scalar is refused later, by YAML itself.
        text = str(key.value) if isinstance(key, yaml.ScalarNode) else f"key at line {key.start_mark.line + 1}"
        line = key.start_mark.line + 1
        if text in seen and text != "<<":
            where = f"lines {seen[text]} and {line}" if seen[text] != line else f"line {line}"
            raise ConfigError(f"{text!r} is written twice, on {where}", file=f"{name}:{line}", hint="keep one")
        seen[text] = line
        yield text, value, line


def _yaml_error(error: yaml.MarkedYAMLError, text: str, name: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 0
    lines = text.splitlines()
    written = lines[line - 1] if 0 < line <= len(lines) else ""
    if "\t" in written[: len(written) - len(written.lstrip())]:
        return ConfigError("a tab indents this line", file=f"{name}:{line}", hint="YAML indents with spaces")
    if "'\\t'" in str(error.problem):
        return ConfigError("a tab outside of quotes", file=f"{name}:{line}", hint="want a space, or quotes around it")
    return ConfigError(f"not YAML: {_one_line(error.problem or error.context or error)}", file=f"{name}:{line}")


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__

"""Load: a YAML file as plain data that knows its lines, with OmegaConf's interpolations resolved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stagemesh.config.errors import ConfigError
from stagemesh.config.origins import Origin, Origins, Path, Tree

MAX_FILE_BYTES = 4 << 20
MAX_DEPTH = 64


def read_tree(file: FilePath) -> Tree:
    """Read one file. Raises ConfigError that names the file and, where YAML itself is broken, the line."""
    name = str(file)
    try:
        raw = file.read_bytes()
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"is larger than {MAX_FILE_BYTES >> 20} MiB: that is no pipeline file", file=name)
        text = raw.decode()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", file=name) from None
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text", file=name) from None
    return parse_tree(text, name)


def parse_tree(text: str, name: str) -> Tree:
    """The same for a text. Raises ConfigError."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise ConfigError("is empty", file=name, hint="a pipeline file is a mapping with `stages`")
        lines = dict(_lines(node, (), name))
        plain = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        raise _yaml_error(error, text, name) from None
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        raise ConfigError(_one_line(error), file=name) from None
    if not isinstance(plain, dict):
        raise ConfigError(
            "is not a mapping", file=name, value=plain, hint="a pipeline file is a mapping with `stages`"
        )
    try:
        data = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError, AttributeError, KeyError) as error:
        path = str(getattr(error, "full_key", None) or "")
        raise ConfigError(_one_line(error), file=name, path=path) from None
    assert isinstance(data, dict)
    return Tree(_with_text_keys(data), Origins({path: Origin(name, line) for path, line in lines.items()}))


def _lines(node: yaml.Node, path: Path, name: str) -> Iterator[tuple[Path, int]]:
    yield path, node.start_mark.line + 1
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"is nested deeper than {MAX_DEPTH} levels", file=name)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            text = str(getattr(key, "value", key))
            line = key.start_mark.line + 1
            if text in seen and text != "<<":
                raise ConfigError(
                    f"{text!r} is written twice, on lines {seen[text]} and {line}", file=name, hint="keep one"
                )
            seen[text] = line
            yield from _lines(value, (*path, text), name)
            yield (*path, text), line
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _lines(item, (*path, index), name)


def _yaml_error(error: yaml.MarkedYAMLError, text: str, name: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 0
    lines = text.splitlines()
    written = lines[line - 1] if 0 < line <= len(lines) else ""
    if "\t" in written[: len(written) - len(written.lstrip())] or "'\\t'" in str(error.problem):
        return ConfigError("a tab indents this line", file=f"{name}:{line}", hint="YAML indents with spaces")
    return ConfigError(f"not YAML: {_one_line(error.problem or error.context or error)}", file=f"{name}:{line}")


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_text_keys(item) for item in value]
    return value

"""The one error of pipeline configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """Something in a pipeline's configuration is wrong.

    Its text is one line: where (file, path inside it), the value, the problem, and a hint at what would be right.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: str = "",
        path: str = "",
        value: object = None,
        hint: str = "",
    ) -> None:
        self.file, self.path, self.value, self.problem, self.hint = file, path, value, problem, hint
        shown = "" if value is None else _shorten(repr(value))
        where = ": ".join(part for part in (file, path, shown) if part)
        text = f"{where}: {problem}" if where else problem
        super().__init__(_one_line(f"{text}; {hint}" if hint else text))

    def at(self, file: str) -> ConfigError:
        """The same error with its file named."""
        if self.file:
            return self
        return ConfigError(self.problem, file=file, path=self.path, value=self.value, hint=self.hint)


def suggest(name: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str:
    """`"did you mean X?"` for the choice nearest to `name`, or an empty string."""
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else ""


def _shorten(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _one_line(text: str) -> str:
    """Line breaks of keys and names are shown, not made."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)

"""The reference page of the command, from its own options.

python -m stagemesh.cli.reference > docs/reference/cli.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from stagemesh.cli.exits import EXIT_CODES
from stagemesh.cli.main import build

_SHARED_PANEL = "Security"
_HEADER = """\
# The command

<!-- Made by `python -m stagemesh.cli.reference > docs/reference/cli.md`; a test keeps it true. -->

`stagemesh COMMAND --help` shows the same. Every command that speaks to a head finds it by `--head HOST:PORT`, the
environment variable `STAGEMESH_HEAD`, or at 127.0.0.1:8470.
"""


def reference() -> str:
    """The page in Markdown."""
    root = get_command(build())
    commands = list(_walk(root, "stagemesh"))
    parts = [_HEADER, *(_section(name, command) for name, command in commands)]
    shared = {
        param.name: param
        for _, command in commands
        for param in command.params
        if getattr(param, "rich_help_panel", None) == _SHARED_PANEL
    }
    parts.append("## Security options\n\n" + _table(list(shared.values())))
    parts.append(_exit_codes())
    return "\n".join(parts)


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield name, command
        return
    for child_name, child in sorted(children.items()):
        yield from _walk(child, f"{name} {child_name}")


def _section(name: str, command: Any) -> str:
    own = [param for param in command.params if param.name != "help"]
    shared = any(getattr(param, "rich_help_panel", None) == _SHARED_PANEL for param in own)
    own = [param for param in own if getattr(param, "rich_help_panel", None) != _SHARED_PANEL]
    parts = [f"## {name}\n", _help(command.help or "")]
    if own:
        parts.append(_table(own))
    if shared:
        parts.append("And the [security options](#security-options).\n")
    return "\n".join(parts)


def _help(text: str) -> str:
    """Paragraphs as they are, examples (paragraphs that show the command in bold) as code."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = [line.strip() for line in _plain(block).splitlines()]
        is_example = all("[bold]stagemesh" in line for line in block.splitlines())
        blocks.append("```bash\n" + "\n".join(lines) + "\n```\n" if is_example else " ".join(lines) + "\n")
    return re.sub(r"```\n\n```bash\n", "", "\n".join(blocks))


def _table(params: list[Any]) -> str:
    rows = ["| option | meaning | default |", "|---|---|---|"]
    for param in params:
        is_argument = not param.opts[0].startswith("-")
        names = param.opts if is_argument else [*param.opts, *param.secondary_opts]
        shown = f"`{param.metavar or param.name.upper()}`" if is_argument else ", ".join(f"`{name}`" for name in names)
        if not is_argument and param.metavar:
            shown += f" {param.metavar}"
        default = param.default() if callable(param.default) else param.default
        value = "" if default in (None, "", False, (), []) or param.required else f"`{default}`"
        text = _plain(getattr(param, "help", None) or "").replace("|", "\\|").replace("\n", " ")
        rows.append(f"| {shown} | {text} | {value} |")
    return "\n".join(rows) + "\n"


def _exit_codes() -> str:
    rows = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    return (
        "## Exit status\n\n"
        "Errors are one line on standard error, with a hint where there is one. The status says whose turn it is:\n"
        "10 to 19, what was given is wrong; 20 to 29, the mesh cannot do it now.\n\n"
        f"| status | meaning |\n|---|---|\n{rows}\n"
    )


def _plain(text: str) -> str:
    """Without rich's markup."""
    return re.sub(r"(?<!\\)\[/?[a-z ]*\]", "", text).replace("\\[", "[")


if __name__ == "__main__":
    print(reference(), end="")

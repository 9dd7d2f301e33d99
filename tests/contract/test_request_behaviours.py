"""Every line of docs/requests.md has a test that bears its number, and no number is unknown to it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"^\| (R\d+)\*? \|", re.MULTILINE)
TEST = re.compile(r"^\s*(?:async )?def test_(R\d+)_", re.MULTILINE)


def _told(folder: Path) -> set[str]:
    return {number for path in folder.rglob("test_*.py") for number in TEST.findall(path.read_text())}


def test_each_line_about_requests_has_a_test_of_its_number() -> None:
    lines = (ROOT / "docs/requests.md").read_text()
    assert _told(ROOT / "tests") == set(LINE.findall(lines))


def test_lines_that_are_said_to_run_on_engines_have_a_test_there() -> None:
    starred = set(re.findall(r"^\| (R\d+)\* \|", (ROOT / "docs/requests.md").read_text(), re.MULTILINE))
    assert starred == _told(ROOT / "tests/engines")

"""The command as a program: quick help, no heavy imports, security options, certificates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stagemesh.cli.exits import EXIT_CODES
from tests.unit.cli.conftest import Command


def test_help_imports_neither_grpc_nor_numpy_nor_an_engine() -> None:
    code = (
        "import sys; from stagemesh.cli.main import build; from typer.main import get_command; get_command(build());"
        "print(*(name for name in ('grpc', 'numpy', 'torch', 'vllm', 'pydantic', 'uvloop') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_every_command_explains_itself_with_an_example(command: Command) -> None:
    from typer.main import get_command

    from stagemesh.cli.main import build

    own = ["up", "generate", "status", "drain replica", "drain node", "scale", "events", "health", "certs init"]
    group = get_command(build())
    for name in own:
        found = group
        for word in name.split():
            found = found.commands[word]  # type: ignore[attr-defined]
        assert "stagemesh" in (found.help or ""), f"{name} shows no example"
    assert command("--help").code == 0


def test_security_options_reach_the_environment_of_the_process(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STAGEMESH_TLS_CA", "STAGEMESH_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setitem(os.environ, name, "")  # so that it is put back
    ended = command("status", "--tls-ca", str(tmp_path / "none.pem"))
    assert ended.code == 10
    assert ended.err.startswith(f"error: --tls-ca: {tmp_path / 'none.pem'}: cannot be read")


def test_certificates_can_be_made_and_an_authority_is_never_replaced(command: Command, tmp_path: Path) -> None:
    made = command("certs", "init", "head.example", "--dir", str(tmp_path / "certs"))
    assert made.code == 0 and "--tls-ca" in made.out
    assert {path.name for path in (tmp_path / "certs").iterdir()} == {"ca.pem", "ca.key", "mesh.pem", "mesh.key"}
    again = command("certs", "init", "--dir", str(tmp_path / "certs"))
    assert again.code == 10 and "an authority is there already" in again.err
    assert command("certs", "issue", "node", "10.0.0.3", "--dir", str(tmp_path / "certs")).code == 0
    nowhere = command("certs", "issue", "node", "10.0.0.3", "--dir", str(tmp_path / "none"))
    assert nowhere.code == 10 and "No such file" in nowhere.err


def test_the_reference_page_is_what_the_command_says() -> None:
    """Made anew by `python -m stagemesh.cli.reference > docs/reference/cli.md`."""
    page = (Path(__file__).parents[3] / "docs/reference/cli.md").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "stagemesh.cli.reference"], capture_output=True, text=True, timeout=60, check=True
    )
    assert page == done.stdout
    rows = {int(code): text for code, text in re.findall(r"^\| (\d+) \| (.+) \|$", page, re.M)}
    assert rows == EXIT_CODES

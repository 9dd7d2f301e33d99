"""What the client is to people who only install it: its names, and what it does not need."""

from __future__ import annotations

import subprocess
import sys

import stagemesh
import stagemesh.client

BLOCKED = """
import sys
ALLOWED = {"grpc", "google", "numpy", "stagemesh", "typing_extensions"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ALLOWED and top not in sys.stdlib_module_names and not top.startswith(("__editable__", "_")):
            raise ImportError(f"{name} is not among the core dependencies")
sys.meta_path.insert(0, Refuse())
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_needs_only_the_core_dependencies() -> None:
    run(BLOCKED + "import stagemesh\nfor name in stagemesh.__all__: getattr(stagemesh, name)\n")


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = run("import sys, stagemesh; print(*(m for m in ('grpc', 'numpy', 'google.protobuf') if m in sys.modules))")
    assert loaded.strip() == ""  # a replica forks its engine before gRPC may be touched


def test_public_names_exist_and_include_the_whole_client() -> None:
    assert all(getattr(stagemesh, name) is not None for name in stagemesh.__all__)
    assert set(stagemesh.client.__all__) <= set(stagemesh.__all__)
    assert stagemesh.__all__ == sorted(stagemesh.__all__)
    assert set(stagemesh.__all__) <= set(dir(stagemesh))

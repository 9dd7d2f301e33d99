"""Generate common/stagemesh/v1 from protos/.

Run with `make protos`, which uses an environment of its own (.tools): the generator must be old enough that
its output runs with every protobuf that the engines pin, and cannot be installed beside the newest one.
"""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(output: Path) -> int:
    """Write the generated modules below `output`; returns protoc's exit status."""
    sources = sorted(str(p) for p in (ROOT / "protos").rglob("*.proto"))
    well_known = files("grpc_tools") / "_proto"
    plugins = Path(sys.executable).parent
    output.mkdir(parents=True, exist_ok=True)
    return protoc.main(
        [
            "protoc",
            f"-I{ROOT / 'protos'}",
            f"-I{ROOT / 'third_party/googleapis'}",
            f"-I{well_known}",
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"--python_out={output}",
            f"--grpc_python_out={output}",
            f"--mypy_out=quiet:{output}",
            f"--mypy_grpc_out=quiet:{output}",
            *sources,
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "common")
    sys.exit(generate(parser.parse_args().out))

"""`python -m stagemesh_head ...` is `stagemesh head ...`."""

from __future__ import annotations

import sys

from stagemesh.cli.main import run

if __name__ == "__main__":
    sys.argv.insert(1, "head")
    run()

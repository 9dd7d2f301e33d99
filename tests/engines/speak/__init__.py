"""The speak example. Its modules are imported as its own files import each other."""

import sys
from pathlib import Path

SPEAK = Path(__file__).resolve().parents[3] / "examples/speak"
for folder in (SPEAK, SPEAK / "training"):
    sys.path.insert(0, str(folder))

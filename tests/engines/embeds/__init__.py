"""The embeds example. Its modules are imported as its own files import each other."""

import sys
from pathlib import Path

EMBEDS = Path(__file__).resolve().parents[3] / "examples/embeds"
for folder in (EMBEDS / "training", EMBEDS.parent / "shapes/training"):
    sys.path.insert(0, str(folder))

"""Soaks: a mesh of real processes under one kind of trouble for minutes, and whether it comes out whole.

    python benchmarks/soak.py cancel                # 10,000 requests stopped at random moments, one to five minutes
    python benchmarks/soak.py storm                 # 5,000 cancelled requests: is resident memory flat?
    python benchmarks/soak.py kills                 # 300 requests on vLLM while a replica is killed every 5 s
    python benchmarks/soak.py slow                  # 64 requests whose consumer is ten times too slow

Each prints what it saw and ends with status 1, naming what is wrong, when a request hung, differed or left something
behind. The figures in docs/performance.md and docs/operations/failures.md come from here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the helpers of the fault tests

import soak_cancel
import soak_kills
import soak_slow


def main() -> None:
    """Run one soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    soaks = parser.add_subparsers(dest="soak", required=True)
    for module in (soak_cancel, soak_kills, soak_slow):
        module.add_to(soaks)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the mesh of the moment is taken down
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.environ["STAGEMESH_LOCK_DIR"] = str(Path(folder, "locks"))
        wrong = asyncio.run(options.run(Path(folder), options))
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

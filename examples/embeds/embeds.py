"""Start the embeds pipeline as a mesh on this machine, and let it say some English sentences in German.

    python examples/embeds/embeds.py "a tiny crimson star on a dark background"
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import stagemesh

PIPELINE = Path(__file__).parent / "pipeline.yaml"
SENTENCES = [
    "a tiny crimson star on a dark background",
    "a huge golden hoop on a navy background",
    "a medium emerald tent on an ivory background",
]


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sentences", nargs="*", default=SENTENCES, help="English, about one coloured shape")
    options = parser.parse_args()
    print("starting a head and two models on vLLM ...", flush=True)
    try:
        with stagemesh.Mesh(PIPELINE) as mesh:
            for sentence in options.sentences:
                print(f"reader      {sentence}\ntranslator  ", end="", flush=True)
                for frame in mesh.generate(sentence, timeout=60):
                    if isinstance(frame, stagemesh.TextDelta):
                        print(frame.text, end="", flush=True)
                print()
    except stagemesh.StageMeshError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

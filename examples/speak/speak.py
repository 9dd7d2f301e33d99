"""Start the speak pipeline as a mesh on this machine, say one wish aloud into a WAV file, stop.

python examples/speak/speak.py --out out "a little crimson star at night"
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import stagemesh

PIPELINE = Path(__file__).parent / "pipeline.yaml"
WISH = "a little crimson star at night"


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wish", nargs="?", default=WISH, help="English, about one coloured shape")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the sound")
    parser.add_argument("--pitch", type=float, default=110.0, metavar="HZ", help="the voice, 60 to 300")
    options = parser.parse_args()
    print("starting a head, a thinker and a talker on vLLM, and a synthesiser ...", flush=True)
    try:
        with stagemesh.Mesh(PIPELINE) as mesh:
            path = say(mesh, options.wish, options.pitch, options.out)
    except stagemesh.StageMeshError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"the sound is at {path}")
    return 0


def say(mesh: stagemesh.Mesh, wish: str, pitch_hz: float, folder: Path) -> Path:
    """Send one wish; show its caption and when its sound arrives. Returns the path of the WAV file."""
    began, chunks, text = time.monotonic(), list[stagemesh.AudioChunk](), ""
    sampling = {"synthesiser": stagemesh.Llm(extra={"pitch_hz": pitch_hz})}
    for frame in mesh.generate(wish, sampling=sampling, timeout=60):
        if isinstance(frame, stagemesh.TextDelta):
            text += frame.text
        elif isinstance(frame, stagemesh.AudioChunk):
            if not chunks:
                print(f"first sound after {time.monotonic() - began:.2f} s, when the text was {text!r}")
            chunks.append(frame)
    sound = stagemesh.Audio.from_chunks(chunks)
    seconds = sum(len(chunk.samples) for chunk in chunks) / sound.sample_rate_hz
    print(f"{text}: {seconds:.1f} s of sound in {len(chunks)} pieces after {time.monotonic() - began:.2f} s")
    return sound.save(folder / f"{sound.request_id}{sound.suffix}")


if __name__ == "__main__":
    sys.exit(main())

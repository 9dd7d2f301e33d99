"""The main job in one program: start the shapes pipeline as a mesh on this machine, make one picture, stop.

    python examples/shapes/demo.py --out out "a little crimson star at night"
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

import stagemesh

PIPELINE = Path(__file__).parent / "pipeline.yaml"
WISH = "a little crimson star at night"


def main() -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wish", nargs="?", default=WISH)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    options = parser.parse_args()
    console, began = Console(), time.monotonic()
    try:
        with console.status("starting a head, a writer on vLLM and a painter on diffusers ..."):
            mesh = stagemesh.Mesh(PIPELINE).start()
    except stagemesh.StageMeshError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        console.print(f"the mesh serves at {mesh.address} after {time.monotonic() - began:.1f} s")
        path = draw(mesh, options.wish, options.out, console)
    finally:
        mesh.shutdown()
    console.print(f"the picture is at [bold]{path}[/]")
    return 0


def draw(mesh: stagemesh.Mesh, wish: str, folder: Path, console: Console) -> Path | None:
    """Send one wish; show the text as it is written and the progress of the picture. Returns the picture's path."""
    console.print(f"wish     {wish}")
    console.print("caption  ", end="")
    path, bar = None, Progress(TextColumn("picture "), BarColumn(), TextColumn("step {task.completed} of {task.total}"))
    step = bar.add_task("denoising", total=None)
    for frame in mesh.generate(wish, timeout=120):
        if isinstance(frame, stagemesh.TextDelta):
            console.print(frame.text, end="")
        elif isinstance(frame, stagemesh.Progress):
            if not bar.live.is_started:
                console.print()
                bar.start()
            bar.update(step, completed=frame.step, total=frame.total_steps)
        elif isinstance(frame, stagemesh.Image):
            path = frame.save(folder / f"{frame.request_id}{frame.suffix}")
    bar.stop()
    return path


if __name__ == "__main__":
    sys.exit(main())

"""Shapes through the mesh, beside the same two models called one after the other in one process.

    python benchmarks/pipeline.py                   # 1, 4 and 16 wishes at a time, five rounds: about two minutes

The reference is a process of its own with transformers and diffusers, and no server: of the wishes that arrive
together it writes and draws one, then the next. It may use as many threads as suit it. It does not write the companion
that the pipeline has (what to avoid), so that the mesh does more for a wish. Rounds of both alternate, on the
same cores, while the other side is idle. A job's completion time runs from the arrival of all to its own picture.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stagemesh
from stagemesh import Image, TextDelta
from stagemesh.client.aio import AsyncClient
from stagemesh.config.dotted import import_dotted
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb

SHAPES = Path(__file__).resolve().parents[1] / "examples/shapes"
WISHES = [row["wish"] for row in json.loads((SHAPES / "training/held_out.json").read_text())["wishes"]]
START_S = 200.0
JOB_S = 120.0


@dataclass(frozen=True, slots=True)
class Round:
    """Wishes that arrived together."""

    seconds: list[float]
    """Completion time of each, in the order of the wishes."""
    captions: list[str]


# ------------------------------------------------------------------ one after the other
class OneAfterTheOther:
    """Both models in this process."""

    def __init__(self, pipeline: Any) -> None:
        """Args: pipeline: resolved, for the parameters that the mesh uses too."""
        import torch
        from diffusers import DiffusionPipeline
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        writer, painter = pipeline.stages
        self._companions = import_dotted(writer.prompt_expand)
        self._tokenizer = AutoTokenizer.from_pretrained(writer.model, local_files_only=True)
        self._writer = AutoModelForCausalLM.from_pretrained(writer.model, local_files_only=True).eval()
        self._painter = DiffusionPipeline.from_pretrained(painter.model, local_files_only=True)
        self._painter.set_progress_bar_config(disable=True)
        self._max_tokens = writer.default_sampling_params["max_tokens"]
        self._draw = {name: painter.default_sampling_params[name] for name in ("num_inference_steps", "guidance_scale")}
        self.threads = min((1, torch.get_num_threads()), key=self._time_with)
        torch.set_num_threads(self.threads)

    def _time_with(self, threads: int) -> float:
        self._torch.set_num_threads(threads)
        self.one(WISHES[0])
        started = time.perf_counter()
        self.one(WISHES[0])
        return time.perf_counter() - started

    def one(self, wish: str) -> str:
        """Write the caption and what to avoid, and draw; returns the caption."""
        with self._torch.inference_mode():
            caption = self._write(wish)
            made = self._companions(prompt_pb.Prompt(text=wish), sampling_pb.SamplingParams())
            to_avoid = "".join(self._write(companion["prompt"]) for companion in made)
            picture = self._painter(caption, negative_prompt=to_avoid, **self._draw).images[0]
        picture.load()
        return caption

    def _write(self, wish: str) -> str:
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": wish}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = self._writer.generate(**prompt, do_sample=False, max_new_tokens=self._max_tokens)
        return str(self._tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))

    def many(self, wishes: list[str]) -> Round:
        """One after the other."""
        started, done = time.perf_counter(), Round([], [])
        for wish in wishes:
            done.captions.append(self.one(wish))
            done.seconds.append(time.perf_counter() - started)
        return done


def serve_reference() -> None:
    """Numbers of wishes in, rounds out, a line each."""
    from stagemesh.config import load_pipeline

    with contextlib.redirect_stdout(sys.stderr):
        models = OneAfterTheOther(load_pipeline(SHAPES / "pipeline.yaml"))
    print(json.dumps({"threads": models.threads}), flush=True)
    for line in sys.stdin:
        done = models.many(WISHES[: int(line)])
        print(json.dumps({"seconds": done.seconds, "captions": done.captions}), flush=True)


class Reference:
    """The process of the reference."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--reference"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        self.threads = self._read()["threads"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the reference process ended")
        return dict(json.loads(line))

    def many(self, count: int) -> Round:
        """A round of so many wishes."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        return Round(**self._read())

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(20)


# ------------------------------------------------------------------ through the mesh
async def through_the_mesh(client: AsyncClient, count: int) -> Round:
    """A round of so many wishes, all at once."""
    started = time.perf_counter()

    async def job(wish: str) -> tuple[float, str]:
        caption, pictures = "", 0
        async for frame in client.generate(wish, timeout=JOB_S):
            if isinstance(frame, TextDelta):
                caption += frame.text
            elif isinstance(frame, Image):
                pictures += 1
                done = time.perf_counter() - started
        if pictures != 1:
            raise SystemExit(f"{wish!r}: {pictures} pictures")
        return done, caption

    done = await asyncio.gather(*(job(wish) for wish in WISHES[:count]))
    return Round([seconds for seconds, _ in done], [caption for _, caption in done])


async def measure(address: str, reference: Reference, counts: list[int], rounds: int) -> None:
    """Alternate, and print a table."""
    seconds: dict[tuple[int, str], list[list[float]]] = {}
    same = total = 0
    async with AsyncClient(address) as client:
        for number in range(rounds + 1):  # the first one only warms up
            for count in counts:
                theirs = await asyncio.to_thread(reference.many, count)
                ours = await through_the_mesh(client, count)
                if number:
                    seconds.setdefault((count, "reference"), []).append(theirs.seconds)
                    seconds.setdefault((count, "mesh"), []).append(ours.seconds)
                    same += sum(a == b for a, b in zip(ours.captions, theirs.captions, strict=True))
                    total += count
    print(f"{rounds} rounds; the reference uses {reference.threads} threads; {same} of {total} captions are the same")
    print("| wishes at once | one after the other: mean, last | mesh: mean, last | ratio of the means, of the last |")
    print("|---|---|---|---|")
    for count in counts:
        theirs, ours = seconds[count, "reference"], seconds[count, "mesh"]
        row = [statistics.median(of(one) for one in side) for side in (theirs, ours) for of in (statistics.mean, max)]
        ratios = [
            statistics.median(of(a) / of(b) for a, b in zip(theirs, ours, strict=True)) for of in (statistics.mean, max)
        ]
        print(
            f"| {count} | {row[0]:.2f} s, {row[1]:.2f} s | {row[2]:.2f} s, {row[3]:.2f} s "
            f"| {ratios[0]:.2f} ×, {ratios[1]:.2f} × |"
        )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="wishes at a time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reference", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reference:
        serve_reference()
        return
    with stagemesh.Mesh(SHAPES / "pipeline.yaml", start_timeout=START_S) as mesh:
        reference = Reference()
        try:
            asyncio.run(measure(mesh.address, reference, options.at_once, options.rounds))
        finally:
            reference.stop()


if __name__ == "__main__":
    main()

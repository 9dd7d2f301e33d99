"""Measure both models on what they were never trained on.

python evaluate.py writer FOLDER
python evaluate.py painter FOLDER [--guidance G] [--steps N] [--sheet FILE.png]
python evaluate.py chain WRITER PAINTER
python evaluate.py guidance PAINTER
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from diffusers import DiffusionPipeline
from judge import Verdict, judge_caption, judge_picture, read_picture
from make_held_out import load
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer
from wishes import Wish, is_held_out, make_wish
from world import (
    BACKGROUNDS,
    COLOURS,
    HELD_OUT_PAIR_SCENES,
    HELD_OUT_SCENES,
    SHAPES,
    SIDE,
    Scene,
    caption,
    caption_to_avoid,
    render,
)

sys.path.append(str(Path(__file__).resolve().parents[1]))
from companions import AVOID

Case = tuple[str, Scene]

BY_HAND: list[Case] = [
    ("a tiny golden star shining at midnight", Scene("small", "yellow", "star", "black")),
    ("Could you draw a huge ruby ball lying on the lawn?", Scene("large", "red", "circle", "green")),
    ("the moon", Scene("medium", "white", "circle", "black")),
    ("a pumpkin in a meadow", Scene("large", "orange", "circle", "green")),
    ("my daughter wants a pink doughnut in the snow", Scene("medium", "pink", "ring", "white")),
    ("big blue box, black background", Scene("large", "blue", "square", "black")),
    ("black pyramid in the fog please", Scene("medium", "black", "triangle", "grey")),
    ("Something like the sun at noon", Scene("large", "yellow", "circle", "blue")),
    ("a lilac hoop swimming in the sea", Scene("medium", "purple", "ring", "blue")),
    ("one wee cherry on the grass", Scene("small", "red", "circle", "green")),
    ("i need an enormous white star in space", Scene("large", "white", "star", "black")),
    ("a green tile, small, on concrete", Scene("small", "green", "square", "grey")),
    ("good morning! please paint a little orange cone", Scene("small", "orange", "triangle", "white")),
    ("a violet marble that is big, under water", Scene("large", "purple", "circle", "blue")),
    ("a snowflake", Scene("small", "white", "star", "blue")),
    ("a traffic cone in the street", Scene("medium", "orange", "triangle", "grey")),
    ("a gigantic emerald bracelet against black", Scene("large", "green", "ring", "black")),
    ("can we see a navy wheel on a grey road", Scene("medium", "blue", "ring", "grey")),
    ("mini magenta cube on paper", Scene("small", "pink", "square", "white")),
    ("an average lemon disc in the night sky", Scene("medium", "yellow", "circle", "black")),
]
"""Wishes in free words, some outside the grammar."""


# -------------------------------------------------------------------------------------- writer


class Writer:
    """Answers wishes one by one, as the mesh does but in this process."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()

    def __call__(self, wish: str) -> str:
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": wish}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = self._model.generate(**prompt, do_sample=False)
        answer = output[0, prompt["input_ids"].shape[1] :]
        return self._tokenizer.decode(answer, skip_special_tokens=True)


def draw_cases(count: int, fits: Callable[[Wish], bool], seed: int = 99) -> list[Case]:
    rng, cases = random.Random(seed), []
    while len(cases) < count:
        wish = make_wish(rng)
        if fits(wish):
            cases.append((wish.text, wish.scene))
    return cases


def measure_writer(writer: Writer, cases: list[Case], name: str, show: int = 6) -> None:
    for before, right, what in (("", caption, "caption"), (AVOID, caption_to_avoid, "to avoid")):
        answers = [(wish, right(scene), writer(before + wish)) for wish, scene in cases]
        wrong = [case for case in answers if case[1] != case[2]]
        print(f"{name}: {what} exact {1 - len(wrong) / len(cases):.3f} of {len(cases)}", flush=True)
        for case in wrong[:show]:
            print("   ", case)


def evaluate_writer(folder: Path) -> None:
    writer, unseen = Writer(folder), set(HELD_OUT_SCENES)
    measure_writer(writer, load(), "held_out.json")
    new_captions = draw_cases(300, lambda wish: wish.scene in unseen and not is_held_out(wish))
    measure_writer(writer, new_captions, "captions never seen")
    new_words = draw_cases(300, lambda wish: wish.scene not in unseen and is_held_out(wish))
    measure_writer(writer, new_words, "pairs of words never seen")
    measure_writer(writer, BY_HAND, "written by hand", len(BY_HAND))


# ------------------------------------------------------------------------------------- painter


class Painter:
    """Draws captions in small batches; picture number n always has seed 1000 + n."""

    def __init__(self, folder: Path, guidance: float, steps: int, batch: int = 10) -> None:
        self._pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
        self._pipeline.set_progress_bar_config(disable=True)
        self._guidance, self._steps, self._batch = guidance, steps, batch

    def __call__(self, captions: list[str], to_avoid: list[str]) -> list[Image.Image]:
        images: list[Image.Image] = []
        for start in range(0, len(captions), self._batch):
            some = captions[start : start + self._batch]
            images += self._pipeline(
                some,
                negative_prompt=to_avoid[start : start + self._batch],
                num_inference_steps=self._steps,
                guidance_scale=self._guidance,
                generator=[torch.Generator().manual_seed(1000 + start + n) for n in range(len(some))],
            ).images
        return images


def share(verdicts: list[Verdict], part: str) -> float:
    return sum(getattr(verdict, part) for verdict in verdicts) / len(verdicts)


def report(verdicts: list[Verdict], name: str) -> None:
    parts = ("colour", "background", "shape", "size", "everything")
    shares = ", ".join(f"{part} {share(verdicts, part):.3f}" for part in parts)
    print(f"{name}: {shares}, of {len(verdicts)}", flush=True)


def measure_painter(painter: Painter, scenes: list[Scene], name: str) -> list[Image.Image]:
    images = painter([caption(scene) for scene in scenes], [caption_to_avoid(scene) for scene in scenes])
    verdicts = [judge_picture(image, scene) for image, scene in zip(images, scenes, strict=True)]
    report(verdicts, name)
    for image, scene, verdict in zip(images, scenes, verdicts, strict=True):
        if not verdict.everything:
            reading = read_picture(image)
            print(f"    {caption(scene)}: looks like {caption(reading.scene)}, overlap {reading.overlap:.2f}")
    return images


def following(names: Iterable[str], name: str, taken: str = "") -> str:
    """The name after `name`, round the end, that is not `taken`."""
    left = [one for one in names if one == name or one != taken]
    return left[(left.index(name) + 1) % len(left)]


TO_AVOID: dict[str, Callable[[Scene], str]] = {
    "nothing": lambda scene: "",
    "what the writer writes": caption_to_avoid,
    "another shape and colour": lambda scene: caption(
        scene._replace(
            shape=following(SHAPES, scene.shape), colour=following(COLOURS, scene.colour, scene.background)
        )
    ),
    "another background": lambda scene: caption(
        scene._replace(background=following(BACKGROUNDS, scene.background, scene.colour))
    ),
}


def compare_guidance(folder: Path) -> None:
    """The scenes of held_out.json, guided away from one thing or another."""
    scenes = [scene for _, scene in load()]
    painter = Painter(folder, guidance=2.0, steps=20)
    for name, to_avoid in TO_AVOID.items():
        images = painter([caption(scene) for scene in scenes], [to_avoid(scene) for scene in scenes])
        report([judge_picture(image, scene) for image, scene in zip(images, scenes, strict=True)], name)
        print(f"    mean overlap {np.mean([read_picture(image).overlap for image in images]):.3f}", flush=True)


def judge_renders(scenes: list[Scene]) -> None:
    """The judge itself, on pictures that are right."""
    drawn, _ = render(scenes, np.random.default_rng(5))
    pixels = ((drawn.transpose(0, 2, 3, 1) + 1) * 127.5).round().astype(np.uint8)
    verdicts = [judge_picture(Image.fromarray(one), scene) for one, scene in zip(pixels, scenes, strict=True)]
    report(verdicts, "the judge, on true pictures")


def save_sheet(images: list[Image.Image], path: Path, columns: int = 12) -> None:
    """All pictures on one sheet, at double size."""
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * SIDE, rows * SIDE), (200, 200, 200))
    for number, image in enumerate(images):
        sheet.paste(image, (number % columns * SIDE, number // columns * SIDE))
    sheet.resize((sheet.width * 2, sheet.height * 2), Image.Resampling.NEAREST).save(path)


def evaluate_painter(folder: Path, guidance: float, steps: int, sheet: Path | None) -> None:
    judge_renders(HELD_OUT_SCENES + HELD_OUT_PAIR_SCENES)
    painter = Painter(folder, guidance, steps)
    images = measure_painter(painter, HELD_OUT_SCENES, "scenes never seen")
    images += measure_painter(painter, HELD_OUT_PAIR_SCENES, "colour and shape never seen together")
    if sheet:
        save_sheet(images, sheet)


def evaluate_chain(writer_folder: Path, painter_folder: Path) -> None:
    """held_out.json through both models."""
    cases, writer = load(), Writer(writer_folder)
    scenes, start = [scene for _, scene in cases], time.perf_counter()
    captions, to_avoid = ([writer(before + wish) for wish, _ in cases] for before in ("", AVOID))
    images = Painter(painter_folder, guidance=2.0, steps=20)(captions, to_avoid)
    seconds = time.perf_counter() - start
    exact = sum(text == caption(scene) for text, scene in zip(captions, scenes, strict=True))
    print(f"captions exact {exact / len(cases):.3f}, {seconds / len(cases):.2f} s for a wish")
    report([judge_caption(text, scene) for text, scene in zip(captions, scenes, strict=True)], "captions")
    report([judge_picture(image, scene) for image, scene in zip(images, scenes, strict=True)], "pictures")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("writer").add_argument("folder", type=Path)
    painter = kinds.add_parser("painter")
    painter.add_argument("folder", type=Path)
    painter.add_argument("--guidance", type=float, default=2.0)
    painter.add_argument("--steps", type=int, default=20)
    painter.add_argument("--sheet", type=Path)
    chain = kinds.add_parser("chain")
    chain.add_argument("writer", type=Path)
    chain.add_argument("painter", type=Path)
    kinds.add_parser("guidance").add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.kind == "writer":
        evaluate_writer(options.folder)
    elif options.kind == "painter":
        evaluate_painter(options.folder, options.guidance, options.steps, options.sheet)
    elif options.kind == "guidance":
        compare_guidance(options.folder)
    else:
        evaluate_chain(options.writer, options.painter)


if __name__ == "__main__":
    main()

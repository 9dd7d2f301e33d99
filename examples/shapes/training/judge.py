"""Judge what the two models make: which parts of a wished scene does a picture, or a caption, get right?

A picture is read without knowing the wish. The border gives the background, the pixels that stand out from it
give the colour, and the drawn shape that overlaps them best gives shape and size. Numpy and pillow only.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image
from world import RGB, SHAPES, SIDE, SIZES, Scene, coverage, parse_caption

BORDER = 2
"""Width in pixels of the rim that must be background: the largest shape leaves 3 free."""
FAINTEST = 40.0
"""Distance in RGB, 0..441, below which nothing stands out; purple and grey, the closest two, differ by 97."""
FARTHEST = 5
"""Shapes are looked for with centres up to this many pixels from the middle, in x and in y."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which parts of a scene hold."""

    size: bool
    colour: bool
    shape: bool
    background: bool

    @property
    def everything(self) -> bool:
        return self.size and self.colour and self.shape and self.background


class Reading(NamedTuple):
    """What a picture seems to show."""

    scene: Scene
    """Size, colour and shape are empty where nothing stands out from the background."""
    overlap: float
    """Intersection over union of what stands out and the ideal shape, 0..1."""


def judge_picture(image: Image.Image, wished: Scene) -> Verdict:
    """Compare a picture of any size with the wished scene."""
    return _compare(read_picture(image).scene, wished)


def judge_caption(text: str, wished: Scene) -> Verdict:
    """Compare a caption with the wished scene; a text of any other form gets nothing right."""
    return _compare(parse_caption(text) or Scene("", "", "", ""), wished)


def read_picture(image: Image.Image) -> Reading:
    """Find out what a picture shows."""
    if image.size != (SIDE, SIDE):
        image = image.resize((SIDE, SIDE), Image.Resampling.BOX)
    pixels = np.asarray(image.convert("RGB"), np.float32)
    inside = np.zeros((SIDE, SIDE), bool)
    inside[BORDER:-BORDER, BORDER:-BORDER] = True
    ground = np.median(pixels[~inside], axis=0)
    distance = np.linalg.norm(pixels - ground, axis=-1)
    strongest = float(np.quantile(distance, 0.98))  # the smallest star covers 3 % of the picture
    background = nearest_colour(ground)
    if strongest < FAINTEST:
        return Reading(Scene("", "", "", background), 0.0)
    stands_out = distance > 0.5 * strongest
    colour = nearest_colour(np.median(pixels[stands_out], axis=0))
    shape, size, overlap = _best_shape(stands_out)
    return Reading(Scene(size, colour, shape, background), overlap)


def nearest_colour(rgb: np.ndarray) -> str:
    """Name of the colour that is closest to `rgb` [3], 0..255."""
    names, values = list(RGB), np.array(list(RGB.values()), np.float32)
    return names[int(((values - rgb) ** 2).sum(-1).argmin())]


def _compare(found: Scene, wished: Scene) -> Verdict:
    return Verdict(*(mine == theirs for mine, theirs in zip(found, wished, strict=True)))


def _best_shape(stands_out: np.ndarray) -> tuple[str, str, float]:
    """Shape, size and overlap of the ideal shape that covers the marked pixels [SIDE, SIDE] best."""
    names, ideals = _ideal_shapes()
    marked = stands_out.ravel().astype(np.float32)
    common = ideals @ marked
    overlap = common / (ideals.sum(1) + marked.sum() - common)
    best = int(overlap.argmax())
    return (*names[best], float(overlap[best]))


@cache
def _ideal_shapes() -> tuple[list[tuple[str, str]], np.ndarray]:
    """(shape, size) of each ideal shape in each place; its pixels, float32 [count, SIDE * SIDE], 0 or 1."""
    steps = np.arange(-FARTHEST, FARTHEST + 1, dtype=np.float32) + SIDE / 2
    centre_x, centre_y = (grid.ravel() for grid in np.meshgrid(steps, steps))
    places = len(centre_x)
    names: list[tuple[str, str]] = []
    pixels: list[np.ndarray] = []
    for shape in SHAPES:
        for size, radius in SIZES.items():
            covered = coverage([shape] * places, np.full(places, radius), centre_x, centre_y)
            pixels.append(covered.reshape(places, -1) > 0.5)
            names += [(shape, size)] * places
    return names, np.concatenate(pixels).astype(np.float32)

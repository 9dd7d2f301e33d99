"""The little world of the shapes example: one coloured shape on one plain background, and nothing else.

Numpy only, so that a test can judge pictures without importing an engine.
"""

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SIDE = 64
"""Width and height of a picture in pixels."""

RGB: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "orange": (255, 140, 0),
    "yellow": (255, 225, 30),
    "green": (30, 160, 50),
    "blue": (40, 90, 220),
    "purple": (130, 40, 170),
    "pink": (255, 130, 190),
    "white": (250, 250, 250),
    "black": (15, 15, 15),
    "grey": (128, 128, 128),
}
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "white", "black")
BACKGROUNDS = ("white", "black", "blue", "green", "grey")
SHAPES = ("circle", "square", "triangle", "star", "ring")
SIZES: dict[str, float] = {"small": 11.0, "medium": 17.0, "large": 25.0}
"""Name of a size -> nominal radius in pixels."""

SIZE_SPREAD = 0.05
"""A drawn radius differs from the nominal one by at most this fraction."""
CENTRE_SPREAD = 2.0
"""A drawn centre lies at most this many pixels from the middle, in x and in y."""


class Scene(NamedTuple):
    """What a picture shows; `size` may be empty where a caption leaves it open."""

    size: str
    colour: str
    shape: str
    background: str


def caption(scene: Scene) -> str:
    """The one sentence that names the scene, e.g. "a small red star on a grey background"."""
    words = (scene.size, scene.colour, scene.shape)
    return f"a {' '.join(word for word in words if word)} on a {scene.background} background"


MISTAKEN_FOR = {"circle": "ring", "ring": "circle", "square": "circle", "triangle": "star", "star": "triangle"}
"""Shape -> the one that it is most easily mistaken for."""


def caption_to_avoid(scene: Scene) -> str:
    """The caption of what the picture must not become: the shape that the wished one is most easily mistaken for.

    Colours stay: guidance away from another colour would bend the wished one.
    """
    return caption(scene._replace(size="", shape=MISTAKEN_FOR[scene.shape]))


_CAPTION = re.compile(r"a (\w+) (\w+) (\w+) on a (\w+) background")


def parse_caption(text: str) -> Scene | None:
    """The scene that a full caption names, or None if the text is not such a caption."""
    match = _CAPTION.fullmatch(text.strip())
    scene = Scene(*match.groups()) if match else None
    return scene if scene in _KNOWN else None


# ------------------------------------------------------------------------------- held-out sets

SCENES = [
    Scene(size, colour, shape, background)
    for colour in COLOURS
    for shape in SHAPES
    for size in SIZES
    for background in BACKGROUNDS
    if colour != background
]
_KNOWN = frozenset(SCENES)

PAIRS_HELD_OUT = {("purple", "star"), ("orange", "ring"), ("green", "triangle")}
"""Colour and shape never together in the captions that the painter learns: does it compose them?"""


def _split(seed: int = 7, held_out: int = 60) -> tuple[list[Scene], list[Scene], list[Scene]]:
    pairs = [scene for scene in SCENES if (scene.colour, scene.shape) in PAIRS_HELD_OUT]
    rest = [scene for scene in SCENES if (scene.colour, scene.shape) not in PAIRS_HELD_OUT]
    random.Random(seed).shuffle(rest)
    return sorted(rest[held_out:]), sorted(rest[:held_out]), pairs


TRAIN_SCENES, HELD_OUT_SCENES, HELD_OUT_PAIR_SCENES = _split()
"""What the painter learns from; what neither model ever sees; the scenes of `PAIRS_HELD_OUT`."""


# ------------------------------------------------------------------------------------ renderer


def _star_distance(x: np.ndarray, y: np.ndarray, radius: np.ndarray, inner: float = 0.42) -> np.ndarray:
    """Signed distance to a five-pointed star: fold the plane into one tenth, then measure to one edge."""
    cos36, sin36 = np.float32(0.809016994), np.float32(0.587785252)
    x = np.abs(x)
    fold = 2 * np.maximum(cos36 * x - sin36 * y, 0)
    x, y = x - fold * cos36, y + fold * sin36
    fold = 2 * np.maximum(-cos36 * x - sin36 * y, 0)
    x, y = x + fold * cos36, y + fold * sin36
    x, y = np.abs(x), y - radius
    edge_x, edge_y = inner * sin36, inner * cos36 - 1
    along = np.clip((x * edge_x + y * edge_y) / (edge_x**2 + edge_y**2), 0, radius)
    return np.hypot(x - edge_x * along, y - edge_y * along) * np.sign(y * edge_x - x * edge_y)


def _distance(shape: str, x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """Signed distance in pixels to the outline of `shape`, negative inside; `y` points up."""
    if shape == "circle":
        return np.hypot(x, y) - radius
    if shape == "ring":
        return np.abs(np.hypot(x, y) - radius * 0.775) - radius * 0.225
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - radius * 0.88
    if shape == "triangle":
        y = y + radius * 0.2
        return np.maximum(-y, np.abs(x) * 0.866 + y * 0.5) - radius * 0.55
    if shape == "star":
        return _star_distance(x, y, radius * 1.08)
    raise ValueError(f"unknown shape {shape!r}, known are {', '.join(SHAPES)}")


def coverage(
    shapes: Sequence[str], radius: np.ndarray, centre_x: np.ndarray, centre_y: np.ndarray
) -> np.ndarray:
    """How much of each pixel a shape covers.

    `shapes` has B names, the arrays are [B] in pixels. Returns float32 [B, SIDE, SIDE] in 0..1.
    """
    axis = np.arange(SIDE, dtype=np.float32) + 0.5
    radius, centre_x, centre_y = (
        np.asarray(values, np.float32).reshape(-1, 1, 1) for values in (radius, centre_x, centre_y)
    )
    x, y = np.broadcast_arrays(axis[None, None, :] - centre_x, centre_y - axis[None, :, None])
    kinds = np.asarray(shapes)
    covered = np.empty(x.shape, np.float32)
    for shape in SHAPES:
        rows = np.nonzero(kinds == shape)[0]
        if len(rows):
            covered[rows] = np.clip(0.5 - _distance(shape, x[rows], y[rows], radius[rows]), 0, 1)
    return covered


def render(scenes: Sequence[Scene], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw scenes, each with a slightly random size and place.

    Returns pictures, float32 [B, 3, SIDE, SIDE] in -1..1, and their coverage, float32 [B, SIDE, SIDE].
    """
    count = len(scenes)
    radius = np.array([SIZES[scene.size] for scene in scenes]) * rng.uniform(
        1 - SIZE_SPREAD, 1 + SIZE_SPREAD, count
    )
    centre_x, centre_y = SIDE / 2 + rng.uniform(-CENTRE_SPREAD, CENTRE_SPREAD, (2, count))
    covered = coverage([scene.shape for scene in scenes], radius, centre_x, centre_y)
    front = _signed_colours([scene.colour for scene in scenes])
    back = _signed_colours([scene.background for scene in scenes])
    return covered[:, None] * front + (1 - covered[:, None]) * back, covered


def _signed_colours(names: Sequence[str]) -> np.ndarray:
    """Names -> float32 [B, 3, 1, 1] in -1..1."""
    return (np.array([RGB[name] for name in names], np.float32) / 127.5 - 1)[:, :, None, None]

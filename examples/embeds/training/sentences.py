"""A scene in English, in any of many words, and in German, with the endings that each noun asks for."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "shapes/training"))
from vocabulary import BACKGROUND_WORDS, COLOUR_WORDS, SHAPE_WORDS, SIZE_WORDS
from world import Scene

_SHAPES = {
    "circle": ("Kreis", "er"),
    "square": ("Quadrat", "es"),
    "triangle": ("Dreieck", "es"),
    "star": ("Stern", "er"),
    "ring": ("Ring", "er"),
}
"""Noun, and the ending of adjectives after "ein": masculine or neuter."""
_SIZES = {"small": "klein", "medium": "mittelgroß", "large": "groß"}
_COLOURS = {
    "red": "rot",
    "orange": "orangefarben",
    "yellow": "gelb",
    "green": "grün",
    "blue": "blau",
    "purple": "violett",
    "pink": "rosafarben",
    "white": "weiß",
    "black": "schwarz",
    "grey": "grau",
}


def in_german(scene: Scene) -> str:
    """The scene's sentence, e.g. "ein kleiner roter Stern vor grauem Hintergrund"."""
    noun, ending = _SHAPES[scene.shape]
    looks = f"{_SIZES[scene.size]}{ending} {_COLOURS[scene.colour]}{ending}"
    return f"ein {looks} {noun} vor {_COLOURS[scene.background]}em Hintergrund"


def in_english(scene: Scene, rng: random.Random) -> str:
    """A plain description of the scene, such as "a tiny crimson star on a silver background"."""
    size, colour = rng.choice(SIZE_WORDS[scene.size]), rng.choice(COLOUR_WORDS[scene.colour])
    shape, background = rng.choice(SHAPE_WORDS[scene.shape]), rng.choice(BACKGROUND_WORDS[scene.background])
    return f"{_article(size)} {size} {colour} {shape} on {_article(background)} {background} background"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"

"""The grammar of wishes: what people might say, and the scene that each wish means.

A wish names a shape by word ("hoop") or by thing ("the moon"), and may leave size or background open; then
the thing decides, else it is a medium shape on white. A shape is never drawn on its own colour: a white shape
on white goes to black, any other clash to white.
"""

import random
import zlib
from typing import NamedTuple

from vocabulary import (
    BACKGROUND_FORMS,
    BACKGROUND_WORDS,
    COLOUR_WORDS,
    ENDINGS,
    OPENINGS,
    PLACES,
    SHAPE_WORDS,
    SIZE_WORDS,
    THINGS,
)
from world import BACKGROUNDS, COLOURS, SHAPES, SIZES, Scene


class Wish(NamedTuple):
    text: str
    scene: Scene
    asked_background: str | None
    """The background that the text names, even where the scene must differ."""
    surface: tuple[str, str | None]
    """The two words that carry the meaning, by which wishes are held out of the training."""


class _Core(NamedTuple):
    """A wish before its background and its politeness."""

    text: str
    colour: str
    shape: str
    size: str
    background: str
    surface: tuple[str, str | None]


def make_wish(rng: random.Random) -> Wish:
    """One random wish."""
    size = rng.choice(list(SIZES)) if rng.random() < 0.72 else None
    asked = rng.choice(BACKGROUNDS) if rng.random() < 0.78 else None
    core = _thing(size, asked, rng) if rng.random() < 0.42 else _shape(size, rng)
    background = visible_background(core.colour, asked or core.background)
    text = _dress(_place(core.text, asked, rng), rng)
    return Wish(text, Scene(core.size, core.colour, core.shape, background), asked, core.surface)


def is_held_out(wish: Wish) -> bool:
    """Whether the wish's pair of words, about one in twelve, is kept from the training."""
    return zlib.crc32(repr(wish.surface).encode()) % 12 == 0


def visible_background(colour: str, background: str) -> str:
    """`background`, or another one if the shape would vanish in it."""
    if colour != background:
        return background
    return "black" if colour == "white" else "white"


def misspell(text: str, rng: random.Random) -> str:
    """Drop, double or swap one letter."""
    at, dice = rng.randrange(len(text)), rng.random()
    if dice < 0.4:
        return text[:at] + text[at + 1 :]
    if dice < 0.7:
        return text[:at] + text[at] + text[at:]
    return text[:at] + text[at + 1 : at + 2] + text[at] + text[at + 2 :]


# ---------------------------------------------------------------------------------- the pieces


def _thing(size: str | None, asked: str | None, rng: random.Random) -> _Core:
    """A thing that has a usual colour, shape and perhaps size and background: "a tiny tomato"."""
    name = rng.choice(list(THINGS))
    thing = THINGS[name]
    colour, surface = thing.colour, (name, asked)
    words = [rng.choice(SIZE_WORDS[size])] if size else []
    if rng.random() < 0.3:
        colour = rng.choice(COLOURS)
        words.append(rng.choice(COLOUR_WORDS[colour]))
        surface = (name, colour)
    text = _with_article(" ".join([*words, name]), rng)
    usual_size, usual_background = size or thing.size or "medium", thing.background or "white"
    return _Core(text, colour, thing.shape, usual_size, usual_background, surface)


def _shape(size: str | None, rng: random.Random) -> _Core:
    """A shape with its colour and perhaps a size, in several word orders: "a hoop that is red and tiny"."""
    colour, shape = rng.choice(COLOURS), rng.choice(SHAPES)
    colour_word, shape_word = rng.choice(COLOUR_WORDS[colour]), rng.choice(SHAPE_WORDS[shape])
    size_word = rng.choice(SIZE_WORDS[size]) if size else ""
    looks = [colour_word, size_word] if size else [colour_word]
    rng.shuffle(looks)
    dice = rng.random()
    if dice < 0.6:
        text = _with_article(f"{size_word} {colour_word} {shape_word}".strip(), rng)
    elif dice < 0.7:
        text = _with_article(" ".join(filter(None, (colour_word, size_word, shape_word))), rng)
    elif dice < 0.8:
        text = f"{_with_article(shape_word, rng)}, {rng.choice((' and ', ', ')).join(looks)}"
    elif dice < 0.9:
        text = f"{_with_article(shape_word, rng)} that is {' and '.join(looks)}"
    else:
        text = f"{_with_article(f'{size_word} {shape_word}'.strip(), rng)} in {colour_word}"
    return _Core(text, colour, shape, size or "medium", "white", (colour_word, shape_word))


def _with_article(words: str, rng: random.Random) -> str:
    dice = rng.random()
    if dice < 0.1:
        return f"{rng.choice(('the', 'my', 'one', 'some kind of', 'this'))} {words}"
    return words if dice < 0.16 else f"{_article(words)} {words}"


def _article(words: str) -> str:
    return "an" if words[0] in "aeiou" else "a"


def _place(text: str, background: str | None, rng: random.Random) -> str:
    """Say where: by a place that implies the colour ("at night"), or by the colour."""
    if background is None:
        return text
    if rng.random() < 0.55:
        where = rng.choice(PLACES[background])
    else:
        word = rng.choice(BACKGROUND_WORDS[background])
        where = rng.choice(BACKGROUND_FORMS).format(word, a=_article(word))
    dice = rng.random()
    if dice < 0.75:
        return f"{text} {where}"
    return f"{where}, {text}" if dice < 0.85 else f"{text}, {where}"


def _dress(text: str, rng: random.Random) -> str:
    """Put the wish into a sentence, politely or not."""
    text = rng.choice(OPENINGS).format(text) + rng.choice(ENDINGS)
    return text[0].upper() + text[1:] if rng.random() < 0.3 else text

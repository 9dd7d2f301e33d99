"""How the talker is to speak: the words of captions as sounds, and a sentence as codes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from codes import PITCH_LEVELS, VOWELS, Code

LEXICON = {
    "a": "AX",
    "on": "AA N",
    "small": "S M AO L",
    "medium": "M IY D IY AX M",
    "large": "L AA R JH",
    "red": "R EH D",
    "orange": "AO R IH N JH",
    "yellow": "Y EH L OW",
    "green": "G R IY N",
    "blue": "B L UW",
    "purple": "P ER P AX L",
    "pink": "P IH NG K",
    "white": "W AY T",
    "black": "B L AE K",
    "grey": "G R EY",
    "circle": "S ER K AX L",
    "square": "S K W EH R",
    "triangle": "T R AY AE NG G AX L",
    "star": "S T AA R",
    "ring": "R IH NG",
    "background": "B AE K G R AW N D",
}
"""American English, in the letters of the ARPAbet. All of these words are stressed on their first vowel."""
_UNSTRESSED = {"a", "on"}

_DIPHTHONGS = {"AY": ("AA", "IY"), "EY": ("EH", "IY"), "OW": ("AO", "UW"), "AW": ("AA", "UW")}
_FRAMES = {"S": 5, "M": 3, "N": 3, "NG": 3, "L": 3, "R": 3, "W": 3, "Y": 3}
"""Length of consonants in codes."""
_STRESSED, _WEAK = 6, 3
"""Length of vowels in codes."""
_REST = 1
"""Silence after a word, in codes."""
_LAST_REST = 8
"""Silence after the last word."""


def sentence(text: str) -> list[Code]:
    """The codes of a caption, whatever chunks it arrives in."""
    words = text.split()
    return [code for n, word in enumerate(words) for code in word_codes(word, n, n == len(words) - 1)]


def word_codes(word: str, number: int, is_last: bool) -> list[Code]:
    """The codes of one word.

    Args:
        number: words before it: the voice sinks as the sentence goes on.
        is_last: the voice falls at its end.
    """
    sounds = list(_sounds(LEXICON[word], word not in _UNSTRESSED, is_last))
    level = max(1, 4 - number // 2)
    codes = []
    for place, (sound, is_stressed) in enumerate(sounds):
        pitch = level + 2 * is_stressed
        if is_last and place > len(sounds) // 2:
            pitch = 0
        codes.append(Code(sound, min(pitch, PITCH_LEVELS - 1)))
    return codes + [Code("-", 0)] * (_LAST_REST if is_last else _REST)


def _sounds(phones: str, stress: bool, is_last: bool) -> Iterator[tuple[str, bool]]:
    """Sounds, each as often as it lasts codes, and whether it is stressed."""
    for place, phone in enumerate(phones.split()):
        vowels = _DIPHTHONGS.get(phone, (phone,) if phone in VOWELS else ())
        if vowels:
            length = (_STRESSED if stress or len(vowels) > 1 else _WEAK) + is_last
            for part, sound in enumerate(vowels):
                count = length - length // 2 if part == 0 and len(vowels) > 1 else length // len(vowels)
                yield from [(sound, stress)] * count
            stress = False
        elif phone in ("P", "T", "K"):
            # A breath follows at both ends of a word, not after S.
            breath = ["H", "H"] if place == 0 else ["H"] if place == len(phones.split()) - 1 else []
            yield from [(sound, False) for sound in ("-", "-", phone, *breath)]
        elif phone in ("B", "D", "G"):
            yield from [(sound, False) for sound in ("=", "=", phone)]
        elif phone == "JH":
            yield from [(sound, False) for sound in ("=", "D", "ZH", "ZH", "ZH")]
        else:
            yield from [(phone, False)] * _FRAMES[phone]

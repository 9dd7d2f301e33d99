"""The codes between talker and synthesiser: one for every 25 ms of speech, a sound and a level of pitch.

A code is a token of the talker; its id is its place in `VOCABULARY`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

FRAME_MS = 25
PITCH_LEVELS = 8
"""Level 0 is the lowest."""

VOWELS = ("IY", "IH", "EH", "AE", "AA", "AO", "UW", "AX", "ER")
GLIDES = ("W", "Y", "R", "L")
NASALS = ("M", "N", "NG")
NOISES = ("S", "ZH", "H")
STOPS = ("P", "T", "K", "B", "D", "G")
"""The moment when a stop opens; before it, the mouth is shut: `-`, or `=` with the voice on."""
SHUT = ("-", "=")
SOUNDS = (*SHUT, *VOWELS, *GLIDES, *NASALS, *NOISES, *STOPS)

PAD, BOS, SAY, END, UNKNOWN = SPECIAL = ("<|pad|>", "<|bos|>", "<|say|>", "<|end|>", "<|unknown|>")
LETTERS = tuple(" .'abcdefghijklmnopqrstuvwxyz")


class Code(NamedTuple):
    """What is heard for `FRAME_MS`."""

    sound: str
    pitch: int

    def __str__(self) -> str:
        return f"{self.sound}{self.pitch}"


CODES = tuple(Code(sound, pitch) for sound in SOUNDS for pitch in range(PITCH_LEVELS))
VOCABULARY: tuple[str, ...] = (*SPECIAL, *LETTERS, *map(str, CODES))
"""The talker's tokens: marks, letters that it reads, codes that it writes."""
FIRST_CODE = len(SPECIAL) + len(LETTERS)


def codes_of(token_ids: Iterable[int]) -> list[Code]:
    """The codes among a talker's tokens; the marks between them say nothing.

    Raises:
        ValueError: a token that is neither.
    """
    codes = []
    for token_id in token_ids:
        if FIRST_CODE <= token_id < len(VOCABULARY):
            codes.append(CODES[token_id - FIRST_CODE])
        elif not 0 <= token_id < len(SPECIAL):
            raise ValueError(f"token {token_id} is no code; those are {FIRST_CODE} to {len(VOCABULARY) - 1}")
    return codes

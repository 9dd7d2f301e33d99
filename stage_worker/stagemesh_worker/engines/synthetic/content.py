"""What the synthetic engine makes: pure functions of a key that stands for (prompt, parameters, seed)."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

Array = np.ndarray[Any, Any]

VOCABULARY = tuple(
    f"{first}{second}{third} "
    for first in ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "zu", "ha")
    for second in ("la", "mi", "no", "ra", "se", "ti", "vo", "ne")
    for third in ("n", "r", "s", "l", "t", "m", "k", "d")
)
"""1,024 words; a token's id is its place, its text the word with one space after it."""
EOS_TOKEN_ID = len(VOCABULARY)
"""Never generated as such; a `resume_token_ids` that ends with it is complete."""
_HALF = len(VOCABULARY) // 2


@dataclass(frozen=True, slots=True)
class TokenStream:
    """An endless row of tokens, any of which is found in constant time."""

    base: int
    stride: int

    @classmethod
    def of(cls, key: bytes) -> TokenStream:
        """The row that belongs to `key`."""
        digest = hashlib.blake2b(key, digest_size=16).digest()
        # An odd stride visits every word before one repeats: the vocabulary's size is a power of two.
        return cls(int.from_bytes(digest[:8], "little"), 2 * (int.from_bytes(digest[8:], "little") % _HALF) + 1)

    def token(self, position: int) -> int:
        """Id of the token at `position`, from 0."""
        return (self.base + position * self.stride) % EOS_TOKEN_ID

    def tokens(self, start: int, end: int) -> list[int]:
        """Ids of the positions from `start` up to `end`, exclusive."""
        return [(self.base + position * self.stride) % EOS_TOKEN_ID for position in range(start, end)]


def text_of(token_ids: Sequence[int]) -> str:
    """Text of token ids; ids outside the vocabulary have none."""
    return "".join([VOCABULARY[token_id] for token_id in token_ids if token_id < EOS_TOKEN_ID])


def token_ids_of(text: str) -> list[int]:
    """One id a word of `text`: a stand-in for a tokenizer, to count a prompt's tokens."""
    return [
        int.from_bytes(hashlib.blake2b(word.encode(), digest_size=2).digest(), "little") % EOS_TOKEN_ID
        for word in text.split()
    ]


def image(key: bytes, width: int, height: int, completed: float = 1.0) -> Array:
    """Pixels uint8 [height, width, 3]: two colours and a disc that belong to `key`; noise covers what is not done.

    Args:
        completed: share of the steps made, 0 to 1.
    """
    digest = hashlib.blake2b(key, digest_size=16).digest()
    back, front = np.frombuffer(digest[:3], np.uint8), np.frombuffer(digest[3:6], np.uint8)
    rows, columns = np.mgrid[0:height, 0:width]
    x, y = width * (0.3 + 0.4 * digest[6] / 255), height * (0.3 + 0.4 * digest[7] / 255)
    inside = (columns - x) ** 2 + (rows - y) ** 2 < (min(width, height) * 0.3) ** 2
    pixels = np.where(inside[..., None], front, back).astype(np.uint8)
    if completed < 1.0:
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[8:], "little")))
        noise = generator.integers(0, 256, pixels.shape, dtype=np.uint8)
        pixels = np.where(generator.random((height, width, 1)) < completed, pixels, noise)
    return pixels


def encode_image(pixels: Array, output_format: str) -> bytes:
    """The file of uint8 pixels [height, width, 3]: "png", "jpeg" or "webp"."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=output_format.upper())
    return buffer.getvalue()


def sound(key: bytes, start: int, samples: int, sample_rate_hz: int) -> Array:
    """A tone that belongs to `key`: float32 [samples] in [-1, 1], from sample `start` on."""
    pitch = 220.0 * 2 ** (hashlib.blake2b(key, digest_size=1).digest()[0] % 24 / 12)
    positions = np.arange(start, start + samples, dtype=np.float64)
    return np.asarray(0.3 * np.sin(2 * math.pi * pitch / sample_rate_hz * positions), dtype=np.float32)


def tensor(key: bytes, shape: tuple[int, ...]) -> Array:
    """Normal float32 numbers of `shape` that belong to `key`."""
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, dtype=np.float32)

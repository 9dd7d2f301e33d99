"""The talker's input adapter: the thinker's text as it is written, word by word.

A word is complete when something follows it; the last one is when the thinker is done, which the talker hears as a full
stop and answers with a falling voice. Several words that arrived together are one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from codes import SAY

from stagemesh.config import Stage
from stagemesh_worker.adapters import EngineInput, StageInput


class WordByWord:
    """Made once a request: it keeps the beginning of a word until the rest arrives."""

    def __init__(self) -> None:
        self._begun = ""

    def __call__(self, request: EngineInput, inputs: Sequence[StageInput], stage: Stage) -> EngineInput | None:
        """The words that are complete now, as the talker reads them; None while there is none."""
        text = self._begun + "".join(item.text for item in inputs)
        is_done = all(item.finished for item in inputs)
        whole, space, begun = (text, "", "") if is_done else text.rpartition(" ")
        self._begun = space + begun
        words = whole.split()
        return EngineInput(text=to_read(words, is_done)) if words else None


def to_read(words: Sequence[str], is_done: bool) -> str:
    """A chunk of words as the talker has learnt to read it."""
    return "".join(f" {word.lower()}" for word in words) + ("." if is_done else "") + SAY

"""The parts of the speak example that need no engine: its codes, its adapter, its voice."""

from __future__ import annotations

import numpy as np
import pytest

from stagemesh.config import Stage
from stagemesh_worker.adapters import EngineInput, StageInput
from tests.engines.speak import SPEAK  # noqa: F401  (makes the example's modules importable)

# isort: split
from codes import CODES, FIRST_CODE, SAY, SOUNDS, VOCABULARY, Code, codes_of
from speech import LEXICON, sentence
from voice import FRAME, RATE_HZ, TARGETS, Voice
from words import WordByWord

CAPTION = "a small purple triangle on a grey background"


def read(*chunks: str) -> list[str | None]:
    """What the talker is given when the thinker's text arrives like this."""
    adapter, stage = WordByWord(), Stage(name="talker", model="m")
    inputs = [StageInput("thinker", text=text, finished=n == len(chunks) - 1) for n, text in enumerate(chunks)]
    made = [adapter(EngineInput(text="a wish"), [one], stage) for one in inputs]
    return [one and one.text for one in made]


def test_words_are_passed_on_when_they_are_complete() -> None:
    assert read("a sm", "all", " red star", "") == [f" a{SAY}", None, f" small red{SAY}", f" star.{SAY}"]
    assert read("a Star") == [f" a star.{SAY}"]
    assert read("a ", "") == [f" a{SAY}", None]
    assert read("", "") == [None, None]


def test_token_that_is_no_code_is_refused() -> None:
    assert codes_of([0, FIRST_CODE, 3]) == [CODES[0]]
    for wrong in (-1, FIRST_CODE - 1, len(VOCABULARY)):
        with pytest.raises(ValueError, match=f"token {wrong} is no code"):
            codes_of([FIRST_CODE, wrong])


def test_every_sound_has_a_target_and_every_word_its_codes() -> None:
    assert set(TARGETS) == set(SOUNDS)
    assert set(sentence(" ".join(LEXICON))) <= set(CODES)


def test_pieces_of_any_size_make_the_same_sound() -> None:
    codes = sentence(CAPTION)
    whole, voice = Voice(110).speak(codes), Voice(110)
    pieces = [voice.speak(codes[start : start + 7]) for start in range(0, len(codes), 7)]
    assert np.array_equal(np.concatenate(pieces), whole)
    assert whole.shape == (len(codes) * FRAME,) and whole.dtype == np.float32
    assert 0.05 < np.sqrt(np.mean(whole**2)) < 0.5 and np.abs(whole).max() < 1
    assert np.abs(whole[-FRAME:]).max() < 0.01, "it ends in silence"


@pytest.mark.parametrize("pitch_hz", [80, 110, 220])
def test_voice_has_the_pitch_that_was_asked_for(pitch_hz: float) -> None:
    sound = Voice(pitch_hz).speak([Code("AA", 2)] * 20)[FRAME * 4 : FRAME * 16]
    likeness = np.correlate(sound, sound, "full")[len(sound) :]
    low, high = int(RATE_HZ / 320), int(RATE_HZ / 60)
    period = low + int(np.argmax(likeness[low:high])) + 1
    assert RATE_HZ / period == pytest.approx(pitch_hz, rel=0.02)


@pytest.mark.parametrize("vowel", ["IY", "EH", "AE", "AA", "UW"])
def test_vowel_resonates_where_the_table_says(vowel: str) -> None:
    sound = Voice(80).speak([Code(vowel, 2)] * 40)[FRAME * 8 :]
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound))))
    hz = np.fft.rfftfreq(len(sound), 1 / RATE_HZ)
    first, second = TARGETS[vowel].formants[:2]
    loudness = [spectrum[np.abs(hz - place) < 60].max() for place in (first, (first + second) / 2, second)]
    assert loudness[0] > 1.4 * loudness[1] < loudness[2], loudness

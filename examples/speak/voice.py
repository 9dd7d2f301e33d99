"""A formant synthesiser: codes -> sound, as they come. Rules and a table, nothing learnt, no recording.

A source (pulses of the voice, or noise) goes through resonators in a row, one for each formant of the mouth. Between
two codes everything glides, so that the table needs one target a sound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from codes import FRAME_MS, Code

RATE_HZ = 16_000
FRAME = RATE_HZ * FRAME_MS // 1000
"""Samples of one code."""
BLOCK = FRAME // 5
"""Samples between two settings of the resonators (5 ms)."""
_FFT = 1024
_LEVEL = 0.22
"""Loudness of the whole."""

Array = np.ndarray


class Target(NamedTuple):
    """Where a sound wants the mouth to be. Frequencies in Hz; loudness 0 to 1."""

    voice: float
    formants: tuple[float, float, float]
    breath: float = 0.0
    """Noise through the same resonators."""
    hiss: float = 0.0
    """Noise of a narrow place, round `hiss_hz`."""
    hiss_hz: float = 4000.0
    hiss_width_hz: float = 2000.0
    is_abrupt: bool = False
    """It does not glide in: a stop opens at once."""


_NEUTRAL = (500.0, 1500.0, 2500.0)
TARGETS: dict[str, Target] = {
    "-": Target(0.0, _NEUTRAL),
    "=": Target(0.12, (200.0, 1100.0, 2300.0)),
    "IY": Target(1.0, (280.0, 2250.0, 2950.0)),
    "IH": Target(1.0, (390.0, 2050.0, 2650.0)),
    "EH": Target(1.0, (550.0, 1800.0, 2500.0)),
    "AE": Target(1.0, (690.0, 1660.0, 2490.0)),
    "AA": Target(1.0, (730.0, 1120.0, 2450.0)),
    "AO": Target(1.0, (580.0, 880.0, 2450.0)),
    "UW": Target(1.0, (310.0, 900.0, 2250.0)),
    "AX": Target(0.8, (530.0, 1300.0, 2450.0)),
    "ER": Target(0.9, (480.0, 1300.0, 1700.0)),
    "W": Target(0.7, (300.0, 650.0, 2200.0)),
    "Y": Target(0.7, (270.0, 2250.0, 3000.0)),
    "R": Target(0.7, (340.0, 1150.0, 1550.0)),
    "L": Target(0.65, (360.0, 1000.0, 2800.0)),
    "M": Target(0.45, (250.0, 1050.0, 2200.0)),
    "N": Target(0.45, (250.0, 1500.0, 2500.0)),
    "NG": Target(0.45, (260.0, 2100.0, 2600.0)),
    "S": Target(0.0, (350.0, 1500.0, 2600.0), hiss=0.55, hiss_hz=5600.0, hiss_width_hz=2200.0),
    "ZH": Target(0.25, (300.0, 1800.0, 2500.0), hiss=0.45, hiss_hz=2900.0, hiss_width_hz=1300.0),
    "H": Target(0.0, _NEUTRAL, breath=0.8),
    "P": Target(0.0, (400.0, 1000.0, 2300.0), breath=1.0, hiss=0.6, hiss_hz=900.0, is_abrupt=True),
    "T": Target(0.0, (350.0, 1750.0, 2700.0), breath=0.15, hiss=0.5, hiss_hz=4300.0, is_abrupt=True),
    "K": Target(0.0, (350.0, 1800.0, 2200.0), breath=0.3, hiss=0.8, hiss_hz=1900.0, hiss_width_hz=700, is_abrupt=True),
    "B": Target(0.5, (300.0, 850.0, 2200.0), hiss=0.12, hiss_hz=900.0, is_abrupt=True),
    "D": Target(0.5, (300.0, 1750.0, 2650.0), hiss=0.3, hiss_hz=4000.0, is_abrupt=True),
    "G": Target(0.5, (300.0, 1950.0, 2200.0), hiss=0.3, hiss_hz=1900.0, hiss_width_hz=700.0, is_abrupt=True),
}
"""Typical values for a man's voice, rounded."""

_HIGHER = (3500.0, 4500.0)
"""Formants that hardly move."""
_WIDTHS = (70.0, 100.0, 140.0, 220.0, 300.0)
"""Bandwidths of the resonators in Hz."""
_FIELDS = 8
"""Of a target, as numbers: voice, three formants, breath, hiss, its place and width."""


class Voice:
    """The sound of one utterance; what it has begun goes on in the next call."""

    def __init__(self, pitch_hz: float) -> None:
        """`pitch_hz` is the voice at pitch level 2; a level is two semitones."""
        self._pitch_hz = pitch_hz
        self._before = _numbers(TARGETS["-"])
        self._pitch_before = pitch_hz
        self._phase = 0.0
        self._noise = np.random.Generator(np.random.PCG64(7))
        self._ringing = np.zeros(_FFT)
        """What the resonators still have to give, from the next sample on."""

    def speak(self, codes: Sequence[Code]) -> Array:
        """The next piece: float32 [codes * FRAME] in [-1, 1]."""
        blocks = [self._block(*setting) for code in codes for setting in self._settings(code)]
        return np.tanh(_LEVEL * np.concatenate(blocks)).astype(np.float32) if blocks else np.empty(0, np.float32)

    def _settings(self, code: Code) -> list[tuple[Array, float]]:
        """Numbers of the mouth and pitch in Hz for each block of a code, on the way from the code before."""
        target, count = TARGETS[code.sound], FRAME // BLOCK
        goal = _numbers(target)
        pitch = self._pitch_hz * 2 ** ((code.pitch - 2) / 6)
        ways = [1.0 if target.is_abrupt else min(1.0, (number + 1) / (count - 1)) for number in range(count)]
        made = [
            (self._before + way * (goal - self._before), self._pitch_before + way * (pitch - self._pitch_before))
            for way in ways
        ]
        if target.is_abrupt:
            for number, (mouth, _) in enumerate(made):
                mouth[4:6] *= 0.6**number  # a burst dies away
        self._before, self._pitch_before = goal, pitch
        return made

    def _block(self, mouth: Array, pitch: float) -> Array:
        """`BLOCK` samples."""
        voice, breath, hiss, place, width = mouth[0], mouth[4], mouth[5], mouth[6], mouth[7]
        source = np.zeros(BLOCK)
        if voice > 0.01:
            phases = self._phase + np.arange(1, BLOCK + 1) * (pitch / RATE_HZ)
            beats = np.flatnonzero(np.diff(np.floor(phases), prepend=np.floor(self._phase)))
            source[beats] = voice * 14.0
            self._phase = float(phases[-1] % 1.0)
        noise = self._noise.standard_normal(BLOCK)
        spectrum = np.fft.rfft(source, _FFT) * _TILT + np.fft.rfft(breath * noise, _FFT) * 0.5
        spectrum *= _resonators(mouth[1:4])
        if hiss > 0.01:
            spectrum += np.fft.rfft(hiss * noise, _FFT) * np.exp(-(((_HZ - place) / (width / 2)) ** 2))
        self._ringing += np.fft.irfft(spectrum, _FFT)
        made = self._ringing[:BLOCK].copy()
        self._ringing = np.concatenate([self._ringing[BLOCK:], np.zeros(BLOCK)])
        return made


def _numbers(target: Target) -> Array:
    return np.array([target.voice, *target.formants, target.breath, target.hiss, target.hiss_hz, target.hiss_width_hz])


_HZ = np.fft.rfftfreq(_FFT, 1 / RATE_HZ)
_Z = np.exp(-2j * np.pi * _HZ / RATE_HZ)
_TILT = (1 - 0.98 * _Z) / ((1 - 0.96 * _Z) * (1 - 0.75 * _Z)) * 0.25
"""The pulse of the voice gets weaker with frequency; the lips lift what is high."""


def _resonators(formants: Array) -> Array:
    """Spectrum of all resonators in a row; each lets a steady tone pass unchanged."""
    spectrum = np.ones_like(_Z)
    for hz, width in zip((*formants, *_HIGHER), _WIDTHS, strict=True):
        radius = np.exp(-np.pi * width / RATE_HZ)
        b, c = -2 * radius * np.cos(2 * np.pi * hz / RATE_HZ), radius * radius
        spectrum *= (1 + b + c) / (1 + b * _Z + c * _Z * _Z)
    return spectrum

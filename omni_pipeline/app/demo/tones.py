"""Recordings whose content is the answer: a pitch of one of three classes in one of three timbres.

The highest pitch is low enough for its third harmonic to fit under the Nyquist frequency of the lowest
sampling rate (3 x 1150 Hz < 4 kHz), so that sine and square differ at every rate and file format.
"""

from __future__ import annotations

import io
from typing import Final

import numpy as np
import soundfile
from numpy.typing import NDArray

PITCHES: Final = {"l": (150.0, 250.0), "m": (400.0, 600.0), "h": (950.0, 1150.0)}
"""Answer to lowest and highest fundamental, Hz."""
TIMBRES: Final = {"s": "sine", "q": "square", "n": "noise bursts"}
EXTENSIONS: Final = ("wav", "flac", "mp3")

_RATES = (8_000,) * 4 + (16_000,) * 4 + (22_050, 44_100)  # high rates cost bytes, so they are rare
_MIN_DURATION_S = 0.4
_SUBTYPES: Final = {"wav": "PCM_16", "flac": "PCM_16", "mp3": "MPEG_LAYER_III"}


def render_tone(
    rng: np.random.Generator, *, pitch: str, timbre: str, max_duration_s: float = 1.6
) -> tuple[NDArray[np.float32], int]:
    """Return a recording, float32 [samples, channels] within +-1, and its sampling rate, Hz.

    Args:
        rng: Decides all but pitch and timbre.
        pitch: A key of ``PITCHES``.
        timbre: A key of ``TIMBRES``.
        max_duration_s: Longest recording; the shortest lasts 0.4 seconds.
    """
    rate = int(rng.choice(_RATES))
    channels = 2 if rng.random() < 0.25 else 1
    duration_s = float(np.exp(rng.uniform(np.log(_MIN_DURATION_S), np.log(max_duration_s))))
    time_s = np.arange(round(duration_s * rate)) / rate
    frequency = rng.uniform(*PITCHES[pitch])
    wave = _bursts(rng, time_s, rate, frequency) if timbre == "n" else _steady(rng, time_s, frequency, timbre)
    ramp = np.minimum(1.0, np.minimum(time_s, time_s[::-1]) / 0.02)
    level = rng.uniform(0.25, 0.7)
    gains = rng.uniform(0.6, 1.0, channels)
    hiss = 0.004 * rng.standard_normal((len(time_s), channels), dtype=np.float32)
    sound = level * (ramp * wave)[:, None] * gains + hiss
    return np.clip(sound, -1.0, 1.0).astype(np.float32), rate


def encode_audio(sound: NDArray[np.float32], *, rate: int, extension: str) -> bytes:
    """Return ``sound`` (float32 [samples, channels]) at ``rate`` Hz as a file of one of ``EXTENSIONS``."""
    target = io.BytesIO()
    soundfile.write(target, sound, rate, format=extension.upper(), subtype=_SUBTYPES[extension])
    return target.getvalue()


def _steady(
    rng: np.random.Generator, time_s: NDArray[np.float64], frequency: float, timbre: str
) -> NDArray[np.float32]:
    """Return a sine, or a square wave of the harmonics below 3.8 kHz (so the rate does not change it)."""
    turns = (frequency * time_s + rng.uniform()) % 1.0
    phase = (2 * np.pi * turns).astype(np.float32)
    wave = np.sin(phase)
    if timbre == "q":
        for harmonic in range(3, int(3800 // frequency) + 1, 2):
            wave += np.sin(harmonic * phase) / harmonic
    return np.asarray(wave, dtype=np.float32)


def _bursts(
    rng: np.random.Generator, time_s: NDArray[np.float64], rate: int, frequency: float
) -> NDArray[np.float32]:
    """Return noise in a narrow band around ``frequency``, switched on and off some times per second."""
    length = 1 << (len(time_s) - 1).bit_length()  # a power of two: a transform of prime length is slow
    spectrum = np.fft.rfft(rng.normal(0.0, 1.0, length))
    distance = (np.fft.rfftfreq(length, 1 / rate) - frequency) / (0.05 * frequency)
    noise = np.fft.irfft(spectrum * np.exp(-0.5 * distance**2), length)[: len(time_s)]
    gate = np.sin(2 * np.pi * rng.uniform(4, 7) * time_s + rng.uniform(0, 2 * np.pi)) > -0.2
    return np.asarray(noise / np.abs(noise).max() * gate, dtype=np.float32)

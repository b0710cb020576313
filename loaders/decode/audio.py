"""Recordings to log-mel frames: mono, 16 kHz, as the Whisper family hears them.

soundfile reads WAV, FLAC, Ogg, and MP3 that states its length; PyAV reads the rest (m4a, aac, and MP3 without
an info frame: of those libsndfile guesses the length from the first bit rate and stops there). The spectrum
is that of Whisper (Radford et al. 2022): 400-point windows (periodic Hann) every 160 samples, Slaney mel
bands up to 8 kHz, log10, clamped to 8 below the loudest value, then (x + 4) / 4. The end is followed by
silence, not mirrored, as if the recording stood in a longer one.
"""

from __future__ import annotations

import functools
import io
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.sample import RawSize
from omni_pipeline.core.sizes import HOP_SAMPLES, SAMPLE_RATE, AudioSizes, num_mel_frames

FloatArray = npt.NDArray[np.float32]

WINDOW_SAMPLES = 400
TOLERATED_FRAMES = 2
PYAV_SUFFIXES = frozenset({"m4a", "aac", "mp4"})
BLOCK_FRAMES = 2000
# The info frame of an MP3 names itself within its first bytes.
MP3_INFO_BYTES = 256
DAMAGED_FIX = "replace the file, or let the quarantine take it"


def audio_size(file: IO[bytes], *, suffix: str) -> RawSize:
    """Return rate, length and duration of ``file`` (seekable): from its header, or by decoding.

    m4a, aac, and MP3 without an info frame do not tell their exact number of samples, so those are decoded.

    Raises:
        SampleError: No recording, or one without samples.
    """
    if _needs_pyav(file, suffix):
        waves, rate = read_pyav(file)
        num_samples = len(waves)
    else:
        import soundfile  # only workers that meet audio need it

        try:
            with soundfile.SoundFile(file) as sound:
                num_samples, rate = int(sound.frames), int(sound.samplerate)
        except (soundfile.LibsndfileError, RuntimeError, OSError, TypeError) as error:
            raise _damaged(error) from error
    if num_samples < 1 or num_samples >= 2**62 or rate < 1:
        raise SampleError("recording has no samples", fix=DAMAGED_FIX)
    return RawSize(sample_rate=rate, num_samples=num_samples, duration_s=num_samples / rate)


def decode_audio(data: bytes, mel_frames: int, sizes: AudioSizes, *, suffix: str) -> FloatArray:
    """Return float32 [mel_frames, mels] of a recording.

    Raises:
        SampleError: Damaged, not finite, or of another length than planned by more than two frames.
    """
    file = io.BytesIO(data)
    waves, rate = read_pyav(file) if _needs_pyav(file, suffix) else _read_soundfile(file)
    return mel_of_waves(waves, rate, mel_frames, num_mels=sizes.num_mels, tolerated_frames=TOLERATED_FRAMES)


def mel_of_waves(
    waves: FloatArray, rate: int, mel_frames: int, *, num_mels: int, tolerated_frames: int
) -> FloatArray:
    """Return float32 [mel_frames, num_mels] of ``waves``: float32 [samples] at ``rate`` Hz, within [-1, 1].

    Raises:
        SampleError: Not finite, or of another length than planned by more than ``tolerated_frames``.
    """
    if not np.isfinite(waves).all():
        raise SampleError("recording holds values that are not finite", fix=DAMAGED_FIX)
    if rate != SAMPLE_RATE:
        import soxr  # only recordings of another rate need it

        waves = np.asarray(soxr.resample(waves, rate, SAMPLE_RATE), dtype=np.float32)
    found = int(num_mel_frames(np.asarray(len(waves))))
    if abs(found - mel_frames) > tolerated_frames:
        raise SampleError(
            f"recording gives {found} mel frames, the index says {mel_frames}",
            fix="run `omni data index` again, or let the quarantine take it",
        )
    return log_mel(waves, mel_frames, num_mels=num_mels)


def log_mel(waves: FloatArray, mel_frames: int, *, num_mels: int) -> FloatArray:
    """Return float32 [mel_frames, num_mels] of ``waves``: float32 [samples] at 16 kHz, within [-1, 1]."""
    half = WINDOW_SAMPLES // 2
    # One frame past the planned ones still hears the last samples, and counts for the loudest value.
    num_frames = mel_frames + 1
    padded = np.zeros(num_frames * HOP_SAMPLES + WINDOW_SAMPLES, dtype=np.float32)
    used = waves[: len(padded) - half]
    padded[half : half + len(used)] = used
    padded[:half] = padded[half + 1 : WINDOW_SAMPLES + 1][::-1]
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW_SAMPLES)[::HOP_SAMPLES][:num_frames]
    filters, taper = mel_filters(num_mels), _hann()
    mel = np.empty((num_frames, num_mels), dtype=np.float32)
    for start in range(0, num_frames, BLOCK_FRAMES):
        spectrum = np.fft.rfft(windows[start : start + BLOCK_FRAMES] * taper, axis=1)
        mel[start : start + BLOCK_FRAMES] = (spectrum.real**2 + spectrum.imag**2) @ filters
    logs = np.log10(np.maximum(mel, 1e-10))
    scaled: FloatArray = ((np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0).astype(np.float32)
    return scaled[:mel_frames]


@functools.cache
def mel_filters(num_mels: int) -> npt.NDArray[np.float64]:
    """Return float64 [201, num_mels]: triangles on the Slaney mel scale, 0 to 8000 Hz, of equal area."""
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, WINDOW_SAMPLES // 2 + 1)
    corners = _mel_to_hertz(np.linspace(0.0, _hertz_to_mel(SAMPLE_RATE / 2), num_mels + 2))
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    rising = (frequencies[:, None] - low) / (middle - low)
    falling = (high - frequencies[:, None]) / (high - middle)
    triangles: npt.NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (high - low))
    return triangles


# The Slaney scale: linear below 1 kHz (15 mel), logarithmic above it, 27 steps for a factor of 6.4.
_LOG_STEP = float(np.log(6.4) / 27.0)


def _hertz_to_mel(hertz: float) -> float:
    return hertz * 3.0 / 200.0 if hertz < 1000.0 else 15.0 + float(np.log(hertz / 1000.0)) / _LOG_STEP


def _mel_to_hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(mels < 15.0, mels * 200.0 / 3.0, 1000.0 * np.exp(_LOG_STEP * (mels - 15.0)))


@functools.cache
def _hann() -> npt.NDArray[np.float64]:
    phase = np.arange(WINDOW_SAMPLES) * (2.0 * np.pi / WINDOW_SAMPLES)
    taper: npt.NDArray[np.float64] = 0.5 - 0.5 * np.cos(phase)
    return taper


def _needs_pyav(file: IO[bytes], suffix: str) -> bool:
    """Return whether soundfile cannot read ``file``, or not to its end; leaves it at its start."""
    if suffix.lower() in PYAV_SUFFIXES:
        return True
    if suffix.lower() != "mp3":
        return False
    head = file.read(10)
    tag_bytes = 0
    if head[:3] == b"ID3" and len(head) == 10:
        # Seven bits per byte, so that a size never looks like the start of a frame.
        tag_bytes = 10 + sum(
            (byte & 0x7F) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True)
        )
    file.seek(tag_bytes)
    frame = file.read(MP3_INFO_BYTES)
    file.seek(0)
    for mark in (b"Xing", b"Info"):
        place = frame.find(mark)
        if place >= 0:
            has_count = frame[place + 7 : place + 8]
            return not (has_count and has_count[0] & 1)
    return b"VBRI" not in frame


def _read_soundfile(file: IO[bytes]) -> tuple[FloatArray, int]:
    import soundfile  # only workers that meet audio need it

    try:
        with soundfile.SoundFile(file) as sound:
            waves, rate = sound.read(dtype="float32", always_2d=True), int(sound.samplerate)
    except (soundfile.LibsndfileError, RuntimeError, OSError, TypeError, MemoryError) as error:
        raise _damaged(error) from error
    return _mono(waves), rate


def read_pyav(file: IO[bytes]) -> tuple[FloatArray, int]:
    """Return (float32 [samples], rate) of the first sound track of ``file``, its channels averaged.

    Raises:
        SampleError: No sound, or damaged.
    """
    import av  # only workers that meet such audio need it

    pieces: list[FloatArray] = []
    try:
        with av.open(file, mode="r") as container:
            if not container.streams.audio:
                raise SampleError("file has no audio", fix="name an audio member in the layout")
            stream = container.streams.audio[0]
            rate = int(stream.rate)
            resampler = av.AudioResampler(format="fltp", rate=rate)
            for frame in container.decode(stream):
                pieces += [_mono(piece.to_ndarray().T) for piece in resampler.resample(frame)]
            pieces += [_mono(piece.to_ndarray().T) for piece in resampler.resample(None)]
    except (av.FFmpegError, ValueError, OSError) as error:
        raise _damaged(error) from error
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.float32), rate


def _mono(waves: Any) -> FloatArray:
    mono: FloatArray = np.asarray(waves, dtype=np.float32).mean(axis=1, dtype=np.float32)
    return mono


def _damaged(error: BaseException) -> SampleError:
    return SampleError(f"recording cannot be decoded: {error or type(error).__name__}", fix=DAMAGED_FIX)

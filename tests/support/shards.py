"""Small real media and tar shards for all tests: made on the spot, by the libraries that people use."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import soundfile
from PIL import Image

ORIENTATION_TAG = 0x0112


def picture(width: int, height: int, *, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return uint8 [height, width, 3]: a smooth colour ramp, different for each seed."""
    rows, columns = np.mgrid[0:height, 0:width]
    red = 255 * columns / max(1, width - 1)
    green = 255 * rows / max(1, height - 1)
    blue = np.full_like(red, 37 * seed % 256)
    return np.stack([red, green, blue], axis=-1).astype(np.uint8)


def image_bytes(
    width: int = 64,
    height: int = 48,
    *,
    kind: str = "JPEG",
    seed: int = 0,
    orientation: int | None = None,
    pixels: npt.NDArray[Any] | None = None,
    **save: Any,
) -> bytes:
    """Return a picture file; ``orientation`` is an EXIF value, ``pixels`` replaces the colour ramp."""
    image = Image.fromarray(picture(width, height, seed=seed) if pixels is None else pixels)
    if orientation is not None:
        exif = Image.Exif()
        exif[ORIENTATION_TAG] = orientation
        save["exif"] = exif.tobytes()
    sink = io.BytesIO()
    image.save(sink, format=kind, **save)
    return sink.getvalue()


def tone(seconds: float, *, rate: int = 16_000, hertz: float = 440.0, channels: int = 1) -> npt.NDArray[Any]:
    """Return float32 [samples, channels]: a sine at half loudness, each channel a little higher."""
    times = np.arange(round(seconds * rate)) / rate
    waves = [0.5 * np.sin(2 * np.pi * hertz * (1 + channel / 4) * times) for channel in range(channels)]
    return np.stack(waves, axis=1).astype(np.float32)


def audio_bytes(
    seconds: float = 1.0, *, rate: int = 16_000, kind: str = "WAV", channels: int = 1, hertz: float = 440.0
) -> bytes:
    """Return a recording of a tone as WAV, FLAC, MP3 or OGG."""
    sink = io.BytesIO()
    soundfile.write(sink, tone(seconds, rate=rate, hertz=hertz, channels=channels), rate, format=kind)
    return sink.getvalue()


def m4a_bytes(seconds: float = 1.0, *, rate: int = 16_000) -> bytes:
    """Return a recording of a tone as AAC in an MP4 file."""
    sink = io.BytesIO()
    with av.open(sink, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=rate)
        waves = tone(seconds, rate=rate).T
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(waves), format="fltp", layout="mono")
        frame.sample_rate = rate
        for item in (frame, None):
            container.mux(stream.encode(item))
    return sink.getvalue()


def grey_of(number: int) -> int:
    """Return the grey level that marks frame ``number`` in ``video_bytes``; distinct up to frame 27."""
    return 20 + 8 * number


def video_bytes(
    num_frames: int = 8,
    *,
    width: int = 64,
    height: int = 48,
    fps: int = 8,
    kind: str = "mp4",
    starts_ms: Sequence[int] | None = None,
    rotation: int = 0,
    options: Mapping[str, str] | None = None,
    sound_s: float = 0.0,
    sound_rate: int = 48_000,
) -> bytes:
    """Return a clip whose frame n is grey of level ``grey_of(n)``, its left third 15 darker.

    ``kind`` "mp4", "mov" and "mkv" are H.264, "webm" is VP9. ``starts_ms`` gives each frame its own time
    (variable frame rate). ``sound_s`` seconds of a tone are its sound, AAC, or Opus in "webm".
    """
    sink = io.BytesIO()
    codec = "libvpx-vp9" if kind == "webm" else "libx264"
    with av.open(sink, "w", format="matroska" if kind == "mkv" else kind) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        speed = {"cpu-used": "8", "deadline": "realtime"} if kind == "webm" else {"preset": "ultrafast"}
        stream.options = {**speed, "crf": "10", **(options or {})}
        stream.codec_context.time_base = Fraction(1, 1000)
        sound = (
            container.add_stream("libopus" if kind == "webm" else "aac", rate=sound_rate) if sound_s else None
        )
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(num_frames):
            pixels = np.full((height, width, 3), grey_of(number), dtype=np.uint8)
            pixels[:, : width // 3] -= 15
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = starts_ms[number] if starts_ms else round(number * 1000 / fps)
            frame.time_base = Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        for packet in _sound_packets(sound, sound_s):
            container.mux(packet)
    return sink.getvalue()


def _sound_packets(stream: Any, seconds: float) -> Iterator[Any]:
    if stream is None:
        return
    frame = av.AudioFrame.from_ndarray(tone(seconds, rate=stream.rate).T.copy(), format="flt", layout="mono")
    frame.sample_rate = stream.rate
    resampler = av.AudioResampler(format=stream.format.name, layout="mono", rate=stream.rate)
    for piece in (*resampler.resample(frame), None):
        yield from stream.encode(piece)


def write_tar(
    path: Path,
    members: Mapping[str, bytes] | Iterable[tuple[str, bytes]],
    *,
    tar_format: int = tarfile.USTAR_FORMAT,
) -> Path:
    """Write ``members`` (name, payload) in the given order, names repeated if they are; return the path."""
    pairs = members.items() if isinstance(members, Mapping) else members
    with tarfile.open(path, "w", format=tar_format) as archive:
        for name, payload in pairs:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            archive.addfile(info, io.BytesIO(payload))
    return path


def caption_members(num_samples: int, *, first: int = 0) -> dict[str, bytes]:
    """Return members of image and caption samples of varied sizes, keys ``000000`` on."""
    members: dict[str, bytes] = {}
    for number in range(first, first + num_samples):
        width, height = 56 + 28 * (number % 3), 56 + 28 * (number % 2)
        members[f"{number:06d}.jpg"] = image_bytes(width, height, seed=number)
        members[f"{number:06d}.txt"] = f"picture number {number}".encode()
    return members


def talk_members(num_samples: int, *, first: int = 0) -> dict[str, bytes]:
    """Return members of audio and transcript samples of varied lengths."""
    members: dict[str, bytes] = {}
    for number in range(first, first + num_samples):
        members[f"{number:06d}.wav"] = audio_bytes(0.2 + 0.1 * (number % 3), hertz=300 + 20 * number)
        members[f"{number:06d}.txt"] = f"talk {number}".encode()
    return members


def clip_members(num_samples: int, *, first: int = 0) -> dict[str, bytes]:
    """Return members of video and caption samples of varied lengths."""
    members: dict[str, bytes] = {}
    for number in range(first, first + num_samples):
        members[f"{number:06d}.mp4"] = video_bytes(8 + 4 * (number % 3), width=56, height=56)
        members[f"{number:06d}.txt"] = f"clip {number}".encode()
    return members

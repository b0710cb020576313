"""Media made small for a web page: thumbnails, frames, waveforms.

These are for people to look at; what the model sees is made by ``loaders.decode``. So a piece is shown even
where training would refuse it, and limits here only protect the page.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import av
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from omni_pipeline.core.errors import OmniError

THUMBNAIL_PIXELS = 132
NUM_FRAMES = 6
NUM_PEAKS = 96
MAX_DECODED_FRAMES = 900
MAX_IMAGE_PIXELS = 60_000_000
CANNOT_SHOW = (
    OmniError,
    OSError,
    ValueError,
    IndexError,
    SyntaxError,  # Pillow, on some broken PNG files
    av.FFmpegError,
    Image.DecompressionBombError,
)

_EXIF_ORIENTATION = 0x0112


@dataclass(frozen=True)
class Shown:
    """What a page shows of one piece; see ``GalleryMedia`` for the fields."""

    data: bytes = b""
    frames: tuple[bytes, ...] = ()
    peaks: tuple[float, ...] = ()
    note: str = ""


def image_thumbnail(raw: bytes) -> Shown:
    """Return a thumbnail and the size of a picture, upright.

    Raises:
        OmniError: More pixels than MAX_IMAGE_PIXELS. Pillow's own errors pass through (CANNOT_SHOW).
    """
    with Image.open(io.BytesIO(raw)) as opened:
        if opened.width * opened.height > MAX_IMAGE_PIXELS:
            raise OmniError(f"{opened.width} x {opened.height} pixels, more than a page should decode")
        turned = opened.getexif().get(_EXIF_ORIENTATION, 1) >= 5
        width, height = opened.size[::-1] if turned else opened.size
        opened.draft("RGB", (2 * THUMBNAIL_PIXELS, 2 * THUMBNAIL_PIXELS))
        return Shown(frames=(_jpeg(ImageOps.exif_transpose(opened)),), note=f"{width} x {height}")


def video_thumbnails(raw: bytes) -> Shown:
    """Return NUM_FRAMES thumbnails evenly over a clip (fewer if it is shorter), upright, and its length.

    Raises:
        OmniError: No frame. PyAV's own errors pass through (CANNOT_SHOW).
    """
    with av.open(io.BytesIO(raw)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "SLICE"
        expected = min(stream.frames or MAX_DECODED_FRAMES, MAX_DECODED_FRAMES)
        wanted = set(np.linspace(0, max(expected - 1, 0), NUM_FRAMES).round().astype(int).tolist())
        thumbnails: list[bytes] = []
        number, last, size = 0, 0.0, ""
        for number, frame in enumerate(container.decode(stream), start=1):
            last = frame.time if frame.time is not None else last
            if number - 1 in wanted:
                picture = frame.to_image()
                if frame.rotation:
                    picture = picture.rotate(frame.rotation, expand=True)
                size = f"{picture.width} x {picture.height}"
                thumbnails.append(_jpeg(picture))
            if number >= MAX_DECODED_FRAMES:
                break
    if not thumbnails:
        raise OmniError("no frame could be decoded")
    return Shown(frames=tuple(thumbnails), note=f"{size}, {number} frames, {last:.1f} s")


def waveform(raw: bytes) -> Shown:
    """Return the waveform and the length of a recording.

    Raises:
        OmniError: No sound. PyAV's own errors pass through (CANNOT_SHOW).
    """
    wave, rate = _decode_audio(raw)
    return Shown(peaks=waveform_peaks(wave), note=f"{len(wave) / rate:.1f} s, {rate / 1000:g} kHz")


def waveform_peaks(wave: npt.NDArray[np.float32]) -> tuple[float, ...]:
    """Return the largest magnitude in NUM_PEAKS equal intervals, the loudest being 1."""
    parts = np.array_split(np.abs(wave), min(NUM_PEAKS, len(wave)))
    peaks = np.array([float(part.max()) for part in parts])
    return tuple((peaks / max(peaks.max(), 1e-6)).round(3).tolist())


def _decode_audio(raw: bytes) -> tuple[npt.NDArray[np.float32], int]:
    """Return (mono wave [n], sample rate)."""
    with av.open(io.BytesIO(raw)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="flt", layout="mono", rate=stream.rate)
        frames = [*container.decode(stream), None]  # None drains the resampler
        blocks = [block.to_ndarray()[0] for frame in frames for block in resampler.resample(frame)]
        rate = int(stream.rate)
    if not blocks:
        raise OmniError("no sound could be decoded")
    return np.concatenate(blocks).astype(np.float32), rate


def _jpeg(picture: Image.Image) -> bytes:
    small = picture.convert("RGBA") if "transparency" in picture.info else picture
    if small.mode == "RGBA":
        ground = Image.new("RGBA", small.size, "white")
        small = Image.alpha_composite(ground, small)
    small = small.convert("RGB")
    small.thumbnail((2 * THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=82)
    return out.getvalue()

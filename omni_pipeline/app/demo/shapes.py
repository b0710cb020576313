"""Pictures whose content is the answer: one shape of one colour on a dark ground.

They are small and nearly square, and the object fills most of the picture: all of them become the same few
patches, so a small model learns to read them within a hundred steps. All that is not asked for (size, aspect,
place, tilt, ground, noise, file format) is drawn independently of shape and colour, so that only the pixels
tell the answer.
"""

from __future__ import annotations

import io
import math
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SHAPES: Final = {"c": "circle", "s": "square", "t": "triangle", "x": "cross"}
COLOURS: Final = {"r": (212, 36, 36), "g": (36, 168, 52), "b": (44, 70, 216), "y": (236, 212, 36)}
EXTENSIONS: Final = ("jpg", "png", "webp")

_MIN_SIDE = 46  # all sides from here to _MAX_SIDE round to the same multiple of 28
_MAX_SIDE = 69
_MAX_ASPECT = 1.06
_MARGIN = 1.16  # the widest shape reaches this many radii from its centre, along an axis


def render_shape(rng: np.random.Generator, *, shape: str, colour: str) -> NDArray[np.uint8]:
    """Return a picture, uint8 [height, width, 3]: one of ``SHAPES`` in one of ``COLOURS`` (by their keys)."""
    height, width = _draw_sides(rng)
    radius = min(height, width) * rng.uniform(0.41, 0.43)
    room = _MARGIN * radius
    rows = np.arange(height, dtype=np.float32)[:, None] - rng.uniform(room, height - room)
    columns = np.arange(width, dtype=np.float32)[None, :] - rng.uniform(room, width - room)
    tilt = rng.uniform(-0.05, 0.05)
    across = math.cos(tilt) * columns + math.sin(tilt) * rows
    down = math.cos(tilt) * rows - math.sin(tilt) * columns
    cover = np.clip(_inside_pixels(shape, across, down, radius) + 0.5, 0.0, 1.0)[:, :, None]
    paint = np.asarray(COLOURS[colour], dtype=np.float32) + rng.uniform(-16, 16, 3).astype(np.float32)
    picture = _background(rng, height, width) * (1 - cover) + paint * cover
    strength = int(rng.integers(2, 9))
    noise = rng.integers(-strength, strength + 1, picture.shape, dtype=np.int8)
    return np.asarray(np.clip(picture + noise, 0, 255), dtype=np.uint8)


def encode_image(pixels: NDArray[np.uint8], *, extension: str, quality: int = 85) -> bytes:
    """Return ``pixels`` (uint8 [height, width, 3]) as a file of one of ``EXTENSIONS``."""
    options: dict[str, dict[str, int]] = {
        "jpg": {"quality": quality},
        "png": {"compress_level": 1},
        "webp": {"quality": quality, "method": 0},
    }
    target = io.BytesIO()
    kind = "JPEG" if extension == "jpg" else extension.upper()
    Image.fromarray(pixels).save(target, kind, **options[extension])
    return target.getvalue()


def cut_jpeg(pixels: NDArray[np.uint8]) -> bytes:
    """Return a JPEG file that ends after a third of its picture data: its header reads, its pixels do not."""
    data = encode_image(pixels, extension="jpg")
    scan = data.index(b"\xff\xda")
    return data[: scan + (len(data) - scan) // 3]


def garbled_png(rng: np.random.Generator, pixels: NDArray[np.uint8]) -> bytes:
    """Return a PNG file whose picture data is noise: its header reads, its pixels do not."""
    data = encode_image(pixels, extension="png")
    payload = data.index(b"IDAT") + len(b"IDAT")
    return data[:payload] + rng.bytes(len(data) - payload)


def _draw_sides(rng: np.random.Generator) -> tuple[int, int]:
    height = int(rng.integers(_MIN_SIDE, _MAX_SIDE + 1))
    width = round(height * rng.uniform(1 / _MAX_ASPECT, _MAX_ASPECT))
    return height, min(max(width, _MIN_SIDE), _MAX_SIDE)


def _inside_pixels(
    shape: str, across: NDArray[np.float32], down: NDArray[np.float32], radius: float
) -> NDArray[np.float32]:
    """Return how far inside the shape each pixel lies, in pixels (negative outside)."""
    if shape == "c":
        return np.asarray(radius - np.hypot(across, down), dtype=np.float32)
    if shape == "s":
        return np.asarray(0.92 * radius - np.maximum(np.abs(across), np.abs(down)), dtype=np.float32)
    if shape == "t":
        base = 0.9 * radius - down
        flank = 0.87 * (0.95 * radius + down) / 2 - 0.87 * 0.9 * np.abs(across)
        return np.asarray(np.minimum(base, flank), dtype=np.float32)
    one, other = np.abs(across + down) * 0.7071, np.abs(across - down) * 0.7071
    bar = np.minimum(1.3 * radius - np.maximum(one, other), 0.26 * radius - np.minimum(one, other))
    return np.asarray(bar, dtype=np.float32)


def _background(rng: np.random.Generator, height: int, width: int) -> NDArray[np.float32]:
    """Return a dark greyish ground with a faint slope, float32 [height, width, 3]."""
    base = (rng.uniform(12, 60) + rng.uniform(-8, 8, 3)).astype(np.float32)
    slope = rng.uniform(-16, 16, 2).tolist()
    rows = np.linspace(-0.5, 0.5, height, dtype=np.float32)[:, None]
    columns = np.linspace(-0.5, 0.5, width, dtype=np.float32)[None, :]
    ground = slope[0] * rows + slope[1] * columns
    return np.asarray(ground[:, :, None] + base, dtype=np.float32)

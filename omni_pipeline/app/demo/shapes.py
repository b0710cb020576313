"""Pictures whose content is the answer: one shape of one colour, somewhere, in any size.

The object keeps a floor of 40 % of the short side, so that it survives the resizing to a few patches;
all that is not asked for (size, aspect, place, tilt, background, noise, file format) is drawn independently
of shape and colour, so that only the pixels tell the answer.
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

_MIN_SIDE = 28
_MAX_SIDE = 504
_MARGIN = 1.2  # the widest shape reaches this many radii from its centre


def render_shape(rng: np.random.Generator, *, shape: str, colour: str) -> NDArray[np.uint8]:
    """Return a picture, uint8 [height, width, 3]: one of ``SHAPES`` in one of ``COLOURS`` (by their keys)."""
    height, width = _draw_sides(rng)
    short = min(height, width)
    radius = short * rng.uniform(0.28, 0.4)
    room = _MARGIN * radius
    rows = np.arange(height, dtype=np.float32)[:, None] - rng.uniform(room, height - room)
    columns = np.arange(width, dtype=np.float32)[None, :] - rng.uniform(room, width - room)
    tilt = rng.uniform(-0.2, 0.2)
    across = math.cos(tilt) * columns + math.sin(tilt) * rows
    down = math.cos(tilt) * rows - math.sin(tilt) * columns
    cover = np.clip(_inside_pixels(shape, across, down, radius) + 0.5, 0.0, 1.0)[:, :, None]
    paint = np.asarray(COLOURS[colour], dtype=np.float32) + rng.uniform(-16, 16, 3).astype(np.float32)
    picture = _background(rng, height, width) * (1 - cover) + paint * cover
    strength = int(rng.integers(3, 13))
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
    short = float(np.exp(rng.uniform(np.log(_MIN_SIDE), np.log(_MAX_SIDE * 0.8))))
    long = min(short * float(np.exp(rng.uniform(0, np.log(2.0)))), float(_MAX_SIDE))
    sides = round(short), max(round(short), round(long))
    return sides if rng.random() < 0.5 else (sides[1], sides[0])


def _inside_pixels(
    shape: str, across: NDArray[np.float32], down: NDArray[np.float32], radius: float
) -> NDArray[np.float32]:
    """Return how far inside the shape each pixel lies, in pixels (negative outside)."""
    if shape == "c":
        return np.asarray(radius - np.hypot(across, down), dtype=np.float32)
    if shape == "s":
        return np.asarray(0.86 * radius - np.maximum(np.abs(across), np.abs(down)), dtype=np.float32)
    if shape == "t":
        base = 0.6 * radius - down
        flank = 0.6 * radius + 0.5 * down - 0.866 * np.abs(across)
        return np.asarray(np.minimum(base, flank), dtype=np.float32)
    one, other = np.abs(across + down) * 0.7071, np.abs(across - down) * 0.7071
    bar = np.minimum(1.15 * radius - np.maximum(one, other), 0.27 * radius - np.minimum(one, other))
    return np.asarray(bar, dtype=np.float32)


def _background(rng: np.random.Generator, height: int, width: int) -> NDArray[np.float32]:
    """Return a greyish ground, float32 [height, width, 3]: a slope, half of them with faint stripes."""
    base = (rng.uniform(50, 205) + rng.uniform(-14, 14, 3)).astype(np.float32)
    slope = rng.uniform(-30, 30, 2).tolist()
    rows = np.linspace(-0.5, 0.5, height, dtype=np.float32)[:, None]
    columns = np.linspace(-0.5, 0.5, width, dtype=np.float32)[None, :]
    ground = slope[0] * rows + slope[1] * columns
    if rng.random() < 0.5:
        turns, phase = rng.uniform(2, 9, 2).tolist(), rng.uniform(0, 6.28)
        ground = ground + rng.uniform(4, 14) * np.sin(6.28 * (turns[0] * rows + turns[1] * columns) + phase)
    return np.asarray(ground[:, :, None] + base, dtype=np.float32)

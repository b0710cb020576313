"""Clips whose content is the answer: one bright, textured object crossing a dark ground in one of four ways.

Frames are small and nearly square, so that every frame becomes the same few patches; length, rate, place,
texture and colours vary. The object is always brighter than its ground (with either polarity a small model
needs three times as many steps).

A path and its reverse are the same set of pictures, so no single frame without its time tells the
direction. Frames carry exact time stamps (frame number over frame rate), in H.264 with B-frames (mp4) or
VP9 (webm).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Final

import av
import numpy as np
from numpy.typing import NDArray

DIRECTIONS: Final = {"u": "up", "d": "down", "l": "left", "r": "right"}
EXTENSIONS: Final = ("mp4", "webm")

_RATES = (8, 8, 10, 12)
_MIN_DURATION_S = 1.1  # at four frames per second two temporal patches, with something to spare
_CODECS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "mp4": ("libx264", {"preset": "superfast", "crf": "26"}),
    "webm": ("libvpx-vp9", {"deadline": "realtime", "cpu-used": "8", "crf": "36", "b": "0"}),
}


def render_motion(
    rng: np.random.Generator, *, direction: str, max_duration_s: float = 2.2
) -> tuple[Iterator[NDArray[np.uint8]], int]:
    """Return the frames (uint8 [height, width, 3] each) and the frame rate, frames per second.

    Args:
        rng: Decides all but the direction.
        direction: A key of ``DIRECTIONS``.
        max_duration_s: Longest clip; the shortest lasts 1.1 seconds.
    """
    height, width = (2 * int(side) for side in rng.integers(24, 35, 2))
    rate = int(rng.choice(_RATES))
    duration_s = float(np.exp(rng.uniform(np.log(_MIN_DURATION_S), np.log(max_duration_s))))
    num_frames = max(2, round(duration_s * rate))
    ground, body = _paint(rng, height, width)
    size = body.shape[0]
    along, aside = (height, width) if direction in "ud" else (width, height)
    room = along - size
    travel = rng.uniform(0.8, 1.0) * room
    begin = rng.uniform(0, room - travel)
    path = np.round(begin + travel * np.linspace(0.0, 1.0, num_frames)).astype(int)
    if direction in "ul":
        path = path[::-1]
    fixed = int(rng.integers(0, aside - size + 1))
    places = [(step, fixed) if direction in "ud" else (fixed, step) for step in path.tolist()]
    return _frames(ground, body, places), rate


def encode_video(frames: Iterable[NDArray[np.uint8]], *, rate: int, extension: str) -> bytes:
    """Return a video file of one of ``EXTENSIONS``; equal frames give equal bytes.

    Args:
        frames: uint8 [height, width, 3] each, all of one size, sides even.
        rate: Frames per second.
        extension: ``mp4`` (H.264) or ``webm`` (VP9).
    """
    codec, options = _CODECS[extension]
    target = io.BytesIO()
    # bitexact: matroska else writes a random segment number into each file
    with av.open(target, "w", format=extension, options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1
        stream.codec_context.gop_size = 2 * rate
        for number, pixels in enumerate(frames):
            if number == 0:
                stream.height, stream.width = pixels.shape[:2]
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number
            frame.time_base = Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return target.getvalue()


def _paint(rng: np.random.Generator, height: int, width: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the plain ground [height, width, 3] and the object on a piece of it [size, size, 3]."""
    plain, tone = rng.uniform(10, 60, 3), rng.uniform(170, 245, 3)
    ground = np.full((height, width, 3), plain.astype(np.uint8))
    size = round(min(height, width) * rng.uniform(0.32, 0.44))
    rows, columns = (
        axis.astype(float) - (size - 1) / 2 for axis in np.meshgrid(range(size), range(size), indexing="ij")
    )
    disc = rng.random() < 0.5
    cover = np.hypot(rows, columns) <= size / 2 if disc else np.ones((size, size), dtype=bool)
    angle, turns = rng.uniform(0, np.pi), rng.uniform(1, 2) * 2 * np.pi / size
    wave = np.sin(turns * (np.cos(angle) * rows + np.sin(angle) * columns))
    texture = np.clip(tone + 20 * np.sign(wave)[:, :, None], 0, 255)
    body = np.where(cover[:, :, None], texture, plain).astype(np.uint8)
    return ground, body


def _frames(
    ground: NDArray[np.uint8],
    body: NDArray[np.uint8],
    places: list[tuple[int, int]],
) -> Iterator[NDArray[np.uint8]]:
    size = body.shape[0]
    for row, column in places:
        frame = ground.copy()
        frame[row : row + size, column : column + size] = body
        yield frame

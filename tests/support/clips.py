"""Clips of given frames: a steady rate, and without loss where pixels are compared."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import numpy.typing as npt

Frames = npt.NDArray[np.uint8]


def clip_of(frames: Sequence[Frames] | Frames, rate: Fraction, *, kind: str, exact: bool = False) -> bytes:
    """Return a clip of frames uint8 [H, W, 3]; ``exact`` loses no pixel."""
    sink = io.BytesIO()
    with av.open(sink, "w", format="matroska" if kind == "mkv" else kind) as container:
        stream: Any = container.add_stream("ffv1" if exact else "libx264", rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "bgr0" if exact else "yuv420p"
        stream.options = {} if exact else {"preset": "ultrafast", "crf": "20"}
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return sink.getvalue()

"""Samples cut from the shipped works: photographs, a clip, speech, prose (``media/LICENSES.md``).

They have no question; their text is trained on as a whole. Their lengths differ by orders of magnitude, as in
real mixtures.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from omni_pipeline.app.demo.motion import EXTENSIONS as VIDEO_EXTENSIONS
from omni_pipeline.app.demo.motion import encode_video
from omni_pipeline.app.demo.shapes import encode_image
from omni_pipeline.core.seeding import generator

MEDIA_DIR: Final = Path(__file__).parent / "media"
CAPTIONS: Final = {
    "china": "A painted tower with curved tile roofs stands above trees and a wide lake.",
    "flower": "A round orange dahlia glows in front of dark green leaves.",
    "bigbuckbunny": "A big grey rabbit climbs out of its burrow and stretches in the sun.",
}

_PHOTOS = ("china", "flower")
_LONGEST_PASSAGE = 2500
_SHORTEST_PASSAGE = 100


def photo(seed: int, index: int) -> dict[str, bytes]:
    """Return the members of one sample: a crop of a shipped photograph (jpg) and its caption (txt)."""
    rng = generator(seed, "demo-photos", index)
    name = _PHOTOS[index % len(_PHOTOS)]
    with Image.open(MEDIA_DIR / f"{name}.jpg") as image:
        width, height = image.size
        wide, high = (
            round(side * share) for side, share in zip(image.size, rng.uniform(0.45, 1.0, 2), strict=True)
        )
        left, top = int(rng.integers(0, width - wide + 1)), int(rng.integers(0, height - high + 1))
        scale = float(np.exp(rng.uniform(np.log(0.3), 0.0)))
        size = max(28, round(wide * scale)), max(28, round(high * scale))
        crop = image.resize(size, Image.Resampling.BILINEAR, box=(left, top, left + wide, top + high))
    return {"jpg": encode_image(np.asarray(crop), extension="jpg"), "txt": CAPTIONS[name].encode()}


def clips(seed: int, count: int) -> Iterator[dict[str, bytes]]:
    """Yield the members of ``count`` samples: a small piece of the shipped clip (mp4 or webm), its caption.

    The clip is decoded once for all.
    """
    if not count:
        return
    frames, rate = _clip_frames()
    for index in range(count):
        rng = generator(seed, "demo-clips", index)
        num_frames = int(rng.integers(2 * rate, len(frames) + 1))
        begin = int(rng.integers(0, len(frames) - num_frames + 1))
        every = int(rng.choice([1, 5]))
        width = 2 * int(rng.integers(56, 97))
        height = 2 * round(width * 9 / 32)
        pieces = (
            np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))
            for pixels in frames[begin : begin + num_frames : every]
        )
        extension = VIDEO_EXTENSIONS[index % len(VIDEO_EXTENSIONS)]
        video = encode_video(pieces, rate=rate // every, extension=extension)
        yield {extension: video, "txt": CAPTIONS["bigbuckbunny"].encode()}


def speech_names() -> list[str]:
    """Return the stems of the shipped recordings, sorted."""
    return sorted(path.stem for path in MEDIA_DIR.glob("speech-*.wav"))


def speech(name: str) -> dict[str, bytes]:
    """Return the members of one sample: a recording (wav, as shipped) and what is said in it (txt)."""
    sentence = (MEDIA_DIR / f"{name}.txt").read_text(encoding="utf-8").strip()
    return {"wav": (MEDIA_DIR / f"{name}.wav").read_bytes(), "txt": sentence.encode()}


def passage(seed: int, index: int) -> dict[str, bytes]:
    """Return the member of one sample: 100 to 2500 characters of public-domain prose or verse (txt)."""
    rng = generator(seed, "demo-prose", index)
    text = (MEDIA_DIR / "prose.txt").read_text(encoding="utf-8")
    length = float(np.exp(rng.uniform(np.log(_SHORTEST_PASSAGE + 20), np.log(_LONGEST_PASSAGE))))
    begin = int(rng.integers(0, len(text) - _LONGEST_PASSAGE))
    begin = text.rfind(" ", 0, begin) + 1
    end = text.rfind(" ", begin, begin + int(length))
    return {"txt": text[begin:end].strip().encode()}


def _clip_frames() -> tuple[list[NDArray[np.uint8]], int]:
    """Return the frames of the shipped clip, uint8 [180, 320, 3] each, and their rate per second."""
    with av.open(io.BytesIO((MEDIA_DIR / "bigbuckbunny.mp4").read_bytes())) as container:
        stream = container.streams.video[0]
        rate = round(float(stream.average_rate or 25))
        frames = [
            frame.reformat(width=320, height=180, format="rgb24").to_ndarray()
            for frame in container.decode(stream)
        ]
    return frames, rate

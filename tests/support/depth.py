"""The depth maps of ``examples/depth``, and encoders' files that differ from its in one place."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from omni_pipeline.core.media import KINDS

EXAMPLE = Path(__file__).parents[2] / "examples" / "depth"
ENCODER_FILE = EXAMPLE / "depth_encoder.py"


@contextmanager
def kinds_restored() -> Iterator[None]:
    """Forget afterwards what kinds of media became known inside."""
    known, suffixes = len(KINDS.modalities), dict(KINDS.of_suffix)
    encoders = dict(KINDS.encoders)
    try:
        yield
    finally:
        del KINDS.modalities[known:]
        KINDS.of_suffix, KINDS.encoders = suffixes, encoders


def changed_file(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write the example's file with each first text replaced by the second; return its path."""
    text = ENCODER_FILE.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "changed.py"
    path.write_text(text, encoding="utf-8")
    return path


def depth_map(height: int, width: int, *, millimetres: int) -> bytes:
    """Return a PNG of 16 bits: a plane that slants to the right."""
    slope = np.linspace(0, 50, width)[None, :].repeat(height, axis=0)
    sink = io.BytesIO()
    Image.fromarray((millimetres + slope).astype(np.uint16)).save(sink, format="PNG")
    return sink.getvalue()


def depth_members(count: int, *, first: int = 0, max_side: int = 5) -> dict[str, bytes]:
    """Return the members of ``count`` samples: near and far planes of many sizes, and what they are."""
    members = {}
    for number in range(first, first + count):
        height, width = 16 * (1 + number % max_side), 16 * (1 + number // 2 % max_side) + number % 16
        is_far = number % 2
        members[f"{number:04}.depth.png"] = depth_map(height, width, millimetres=5000 if is_far else 500)
        members[f"{number:04}.txt"] = b"a wall far away" if is_far else b"near"
    return members

"""Pictures to patches: JPEG, PNG and WebP, upright, on white, in sRGB, at exactly the planned size.

The header is judged before anything is decoded, against this project's own limit: Pillow's limit is an error
without the file's name and applies to the process. JPEG is decoded at a reduced scale when the planned size
allows it (at least twice the planned sides are kept, so the bicubic filter has enough to work on).
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms

from loaders.decode.patches import grid_pixels, patchify
from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.sample import RawSize
from omni_pipeline.core.sizes import VisionSizes

UInt8Array = npt.NDArray[np.uint8]

FORMATS = ("JPEG", "PNG", "WEBP")
ORIENTATION_TAG = 0x0112
# What Pillow raises on damaged files, by reading its readers: they parse before they check.
PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    LookupError,
    TypeError,
    OverflowError,
)
TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def image_size(file: IO[bytes]) -> RawSize:
    """Return height and width, upright, from the header of ``file`` (seekable, at its start).

    Reads no pixels; of a WebP file only the chunk headers, wherever its EXIF is.

    Raises:
        SampleError: No JPEG, PNG or WebP header.
    """
    head = file.read(12)
    file.seek(0)
    if head[:4] == b"RIFF" and head[8:] == b"WEBP":
        width, height, turn = _webp_header(file)
    else:
        with _opened(file) as image:
            (width, height), turn = image.size, _orientation(image.info.get("exif"))
    if turn >= 5:
        width, height = height, width
    return RawSize(height=height, width=width)


def decode_image(
    data: bytes, grid: tuple[int, int, int], sizes: VisionSizes, *, max_pixels: int
) -> UInt8Array:
    """Return uint8 [patches, values] of a picture; the one frame fills the whole temporal patch.

    Of an animated picture the first frame is taken.

    Raises:
        SampleError: Damaged, of another format, or larger than ``max_pixels``.
    """
    _, height, width = grid_pixels(grid, sizes)
    with _opened(io.BytesIO(data)) as image:
        check_pixels(image.width, image.height, max_pixels)
        turn = _orientation(image.info.get("exif"))
        target = (height, width) if turn >= 5 else (width, height)
        image.draft("RGB", (target[0] * 2, target[1] * 2))
        try:
            image.load()
        except PILLOW_ERRORS as error:
            raise _damaged(error) from error
        small = _to_srgb(_to_rgb(image).resize(target, Image.Resampling.BICUBIC), image)
    if turn in TRANSPOSES:
        small = small.transpose(TRANSPOSES[turn])
    frame = np.asarray(small, dtype=np.uint8)
    return patchify(np.broadcast_to(frame, (sizes.temporal_patch, *frame.shape)), sizes)


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Raise SampleError when a header says more than ``max_pixels``, or none at all."""
    if width * height > max_pixels:
        raise SampleError(
            f"image header says {width} x {height} pixels, limit {max_pixels}",
            fix="raise loader.max_image_pixels, or let the quarantine take it",
        )


@contextlib.contextmanager
def _opened(file: IO[bytes]) -> Iterator[Image.Image]:
    """Open a picture with Pillow's own pixel limit out of the way (ours has the better message)."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        image = Image.open(file, formats=FORMATS)
    except PILLOW_ERRORS as error:
        raise _damaged(error) from error
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    with image:
        yield image


def _damaged(error: BaseException) -> SampleError:
    text = str(error).partition(" <_io")[0].partition(" <loaders")[0]
    return SampleError(
        f"picture cannot be decoded: {text or type(error).__name__}",
        fix="replace the file (JPEG, PNG or WebP), or let the quarantine take it",
    )


def _orientation(exif: bytes | None) -> int:
    """Return the EXIF orientation, 1 to 8; 1 (upright) when there is none or the block is damaged."""
    if not exif:
        return 1
    tags = Image.Exif()
    try:
        tags.load(exif)
        turn = tags.get(ORIENTATION_TAG, 1)
    except PILLOW_ERRORS:
        return 1
    return turn if isinstance(turn, int) and 1 <= turn <= 8 else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return ``image`` in mode RGB: 16 bits scaled down, transparency composed on white."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image).astype(np.float64)
        top = 255.0 if values.max(initial=0.0) <= 255.0 and image.mode == "F" else 65535.0
        scaled = np.clip(np.rint(values * (255.0 / top)), 0, 255).astype(np.uint8)
        return Image.fromarray(scaled).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_srgb(small: Image.Image, original: Image.Image) -> Image.Image:
    """Return ``small`` in sRGB by the profile of an RGB ``original``; an unreadable profile is passed by."""
    profile = original.info.get("icc_profile")
    if not profile or original.mode not in ("RGB", "RGBA"):
        return small
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "srgb" in ImageCms.getProfileDescription(source).lower():
            return small
        converted = ImageCms.profileToProfile(small, source, ImageCms.createProfile("sRGB"))
    except (ImageCms.PyCMSError, OSError):
        return small
    return converted if converted is not None else small


def _webp_header(file: IO[bytes]) -> tuple[int, int, int]:
    """Return (width, height, orientation) by walking the RIFF chunks; Pillow would read the whole file."""
    file.seek(12)
    size: tuple[int, int] | None = None
    exif: bytes | None = None
    try:
        while len(chunk := file.read(8)) == 8:
            name, length = struct.unpack("<4sI", chunk)
            start = file.tell()
            if name in _WEBP_SIZES and size is None:
                size = _WEBP_SIZES[name](file.read(10))
                if name != b"VP8X":
                    break
            elif name == b"EXIF":
                exif = file.read(min(length, 1 << 20))
                break
            file.seek(start + length + length % 2)
    except struct.error as error:
        raise _damaged(error) from error
    if size is None:
        raise _damaged(ValueError("WebP file without a picture"))
    return size[0], size[1], _orientation(exif)


def _vp8x_size(data: bytes) -> tuple[int, int]:
    width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (4, 7))
    return width, height


def _vp8_size(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack("<HH", data[6:10])
    return width & 0x3FFF, height & 0x3FFF


def _vp8l_size(data: bytes) -> tuple[int, int]:
    (bits,) = struct.unpack("<I", data[1:5])
    return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1


_WEBP_SIZES: dict[bytes, Any] = {b"VP8X": _vp8x_size, b"VP8 ": _vp8_size, b"VP8L": _vp8l_size}

"""loaders.decode.image: upright, on white, RGB, exactly the planned size; bad files are sample errors."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageCms

from loaders.decode.image import decode_image, image_size
from loaders.decode.patches import unpatchify
from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.sample import Modality, RawSize
from omni_pipeline.core.sizes import ModelSizes, VisionSizes, media_grid
from tests.support.shards import image_bytes, picture

SIZES = VisionSizes()
LIMIT = 178_956_970


def decoded(data: bytes, grid: tuple[int, int, int] | None = None) -> npt.NDArray[np.uint8]:
    """Return the decoded picture [H, W, 3]; checks that both frames of the temporal patch are the same."""
    grid = grid or media_grid(Modality.IMAGE, image_size(io.BytesIO(data)), ModelSizes(vision=SIZES))
    frames = unpatchify(decode_image(data, grid, SIZES, max_pixels=LIMIT), grid, SIZES)
    np.testing.assert_array_equal(frames[0], frames[1])
    first: npt.NDArray[np.uint8] = frames[0]
    return first


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return ``image`` as a file."""
    sink = io.BytesIO()
    image.save(sink, kind, **options)
    return sink.getvalue()


def apart(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> float:
    """Return the mean difference in grey levels."""
    return float(np.abs(left.astype(float) - right.astype(float)).mean())


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_keeps_its_content(kind: str) -> None:
    assert apart(decoded(image_bytes(112, 84, kind=kind)), picture(112, 84)) < (0.01 if kind == "PNG" else 4)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_upright(kind: str, orientation: int) -> None:
    data = image_bytes(112, 84, kind=kind, orientation=orientation)
    expected = Image.open(io.BytesIO(data))
    turned = np.asarray(_upright(expected.convert("RGB"), orientation))
    height, width = turned.shape[:2]
    assert image_size(io.BytesIO(data)) == RawSize(height=height, width=width)
    assert apart(decoded(data), turned) < 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    """Turn by the words of the EXIF standard, step by step."""
    pixels = np.asarray(image)
    steps = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1),
        7: np.rot90(pixels, -1)[::-1].copy()[:, :],
        8: np.rot90(pixels, 1),
    }
    steps[7] = np.rot90(pixels.transpose(1, 0, 2), 2)
    return Image.fromarray(np.ascontiguousarray(steps[orientation]))


def test_a_large_jpeg_is_decoded_at_a_reduced_scale_and_looks_the_same() -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    pixels = blocks.repeat(40, axis=0).repeat(40, axis=1)
    data = image_bytes(pixels=pixels, quality=95)
    grid = (1, 16, 20)
    small = decoded(data, grid)
    full = Image.open(io.BytesIO(data)).resize((280, 224), Image.Resampling.BICUBIC)
    # 0.6 at twice the planned sides; 1.8 and more when decoded any smaller.
    assert apart(small, np.asarray(full)) < 1.2


def test_transparency_is_composed_on_white() -> None:
    clear = Image.new("RGBA", (56, 56), (255, 0, 0, 0))
    half = Image.new("RGBA", (56, 56), (0, 0, 0, 128))
    assert (decoded(saved(clear, "PNG")) == 255).all()
    assert abs(int(decoded(saved(half, "PNG"))[0, 0, 0]) - 127) <= 1
    assert (decoded(saved(clear, "WEBP", lossless=True)) == 255).all()
    grey = Image.merge("LA", (Image.new("L", (56, 56), 0), Image.new("L", (56, 56), 0)))
    assert (decoded(saved(grey, "PNG")) == 255).all()
    palette = Image.new("P", (56, 56), 1)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert (decoded(saved(palette, "PNG", transparency=1)) == 255).all()
    assert decoded(saved(palette, "PNG"))[0, 0].tolist() == [40, 50, 60]


def test_other_colour_modes_become_rgb() -> None:
    cmyk = Image.new("CMYK", (56, 56), (0, 255, 255, 0))
    red, green, blue = decoded(saved(cmyk, "JPEG"))[5, 5].tolist()
    assert red > 200
    assert max(green, blue) < 60
    deep = Image.fromarray(np.full((56, 56), 0x8000, dtype=np.uint16))
    assert abs(int(decoded(saved(deep, "PNG"))[5, 5, 0]) - 128) <= 1
    dark = Image.fromarray(np.full((56, 56), 300, dtype=np.uint16))
    assert decoded(saved(dark, "PNG"))[5, 5].tolist() == [1, 1, 1]
    one_bit = Image.new("1", (56, 56), 1)
    assert (decoded(saved(one_bit, "PNG")) == 255).all()
    grey = Image.new("L", (56, 56), 77)
    assert decoded(saved(grey, "PNG"))[5, 5].tolist() == [77, 77, 77]


def test_a_colour_profile_is_applied_and_a_broken_one_passed_by() -> None:
    # A profile with red and blue swapped shows that it is used at all.
    plain = Image.new("RGB", (56, 56), (200, 30, 30))
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    red_at, blue_at = (profile.index(tag, 128 + 4) for tag in (b"rXYZ", b"bXYZ"))
    swapped = bytearray(profile)
    swapped[red_at : red_at + 4], swapped[blue_at : blue_at + 4] = b"bXYZ", b"rXYZ"
    swapped = bytearray(bytes(swapped).replace(b"s\0R\0G\0B", b"t\0e\0s\0t").replace(b"sRGB", b"test"))
    red, _, blue = decoded(saved(plain, "PNG", icc_profile=bytes(swapped)))[5, 5].tolist()
    assert blue > red + 50
    assert decoded(saved(plain, "PNG", icc_profile=profile))[5, 5].tolist() == [200, 30, 30]
    assert decoded(saved(plain, "PNG", icc_profile=b"broken" * 30))[5, 5].tolist() == [200, 30, 30]


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.new("RGB", (56, 56), colour) for colour in ("red", "blue")]
    data = saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert image_size(io.BytesIO(data)) == RawSize(height=56, width=56)
    assert decoded(data)[5, 5].tolist() == [255, 0, 0]


def _png_header_of(width: int, height: int) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_a_picture_bomb_is_refused_from_its_header() -> None:
    data = _png_header_of(20_000, 20_000)
    assert image_size(io.BytesIO(data)) == RawSize(height=20_000, width=20_000)
    with pytest.raises(SampleError) as caught:
        decode_image(data, (1, 4, 4), SIZES, max_pixels=LIMIT)
    assert str(caught.value) == (
        "image header says 20000 x 20000 pixels, limit 178956970\n"
        "  fix:   raise loader.max_image_pixels, or let the quarantine take it"
    )


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_damaged_pictures_are_sample_errors(kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    data = image_bytes(pixels=noise, kind=kind)
    for broken in (data[:-200], data[:40], b"", b"not a picture", b"GIF89a" + bytes(50)):
        with pytest.raises(SampleError, match="picture cannot be decoded"):
            decode_image(broken, (1, 4, 4), SIZES, max_pixels=LIMIT)

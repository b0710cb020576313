"""Pictures against the published processor: the same sides, grids and pixel patches.

The processor is compared in its Pillow form, which resizes as the decoder here does. Its torchvision form
(the same settings) rounds differently in between; the two differ by some levels of 255 at hard edges.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from loaders.decode.image import decode_image, image_size
from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.sample import Modality
from omni_pipeline.core.sizes import ModelSizes, VisionSizes, media_grid, smart_resize
from tests.support.reference_library import transformers
from tests.support.shards import image_bytes
from trainer.model.vision import normalise_patches

REFERENCE = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl
LIMIT = 178_956_970
PUBLISHED = VisionSizes()
LARGE = VisionSizes(max_pixels=16384 * 28 * 28)
SMALL = VisionSizes(max_pixels=100 * 28 * 28)

sides = st.one_of(st.integers(1, 8000), st.integers(0, 300).map(lambda n: 14 * n + 1))
pixels = st.tuples(st.integers(1, 400_000), st.integers(400_000, 13_000_000))


def noise(width: int, height: int, *, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return uint8 [height, width, 3]: blocks of 5 x 5 pixels of random colours, all edges hard."""
    blocks = np.random.default_rng(seed).integers(
        0, 256, (height // 5 + 1, width // 5 + 1, 3), dtype=np.uint8
    )
    return blocks.repeat(5, axis=0).repeat(5, axis=1)[:height, :width]


def ours(data: bytes, sizes: VisionSizes) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Return the normalised patches, float32, and the grid of a picture file."""
    grid = media_grid(Modality.IMAGE, image_size(io.BytesIO(data)), ModelSizes(vision=sizes))
    patches = decode_image(data, grid, sizes, max_pixels=LIMIT)
    return normalise_patches(torch.from_numpy(patches), dtype=torch.float32), grid


def theirs(data: bytes, sizes: VisionSizes) -> Any:
    """Return what the published processor makes of a picture file."""
    size = {"shortest_edge": sizes.min_pixels, "longest_edge": sizes.max_pixels}
    return REFERENCE.Qwen2VLImageProcessorPil(size=size)(
        images=[Image.open(io.BytesIO(data))], return_tensors="pt"
    )


def test_the_settings_are_those_of_the_processor() -> None:
    found = REFERENCE.Qwen2VLImageProcessorPil()
    assert found.size == {"shortest_edge": PUBLISHED.min_pixels, "longest_edge": PUBLISHED.max_pixels}
    assert (found.patch_size, found.merge_size) == (PUBLISHED.patch, PUBLISHED.merge)
    assert found.temporal_patch_size == PUBLISHED.temporal_patch


def assert_same_sides(height: int, width: int, factor: int, bounds: tuple[int, int]) -> None:
    limits: dict[str, int] = dict(zip(("min_pixels", "max_pixels"), bounds, strict=True))
    try:
        expected = REFERENCE.smart_resize(height, width, factor, **limits)
    except ValueError:
        with pytest.raises(SampleError, match=f"aspect ratio of {width} x {height} pixels is above 200"):
            smart_resize(height, width, factor=factor, **limits)
    else:
        assert smart_resize(height, width, factor=factor, **limits) == expected


@given(sides, sides, st.sampled_from([14, 28, 32]), pixels)
def test_sides_are_those_of_the_processor(
    height: int, width: int, factor: int, bounds: tuple[int, int]
) -> None:
    assert_same_sides(height, width, factor, bounds)


@pytest.mark.parametrize(("height", "width"), [(10, 2000), (2000, 10), (10, 2001), (1, 200), (13, 1)])
def test_sides_near_the_aspect_limit_are_those_of_the_processor(height: int, width: int) -> None:
    assert_same_sides(height, width, 28, (3136, 1_003_520))


@pytest.mark.parametrize("sizes", [PUBLISHED, LARGE, SMALL], ids=["published", "large", "small"])
@pytest.mark.parametrize("sides", [(31, 17), (57, 93), (400, 3), (427, 641), (1501, 1199)])
def test_patches_and_grids_are_those_of_the_processor(sides: tuple[int, int], sizes: VisionSizes) -> None:
    data = image_bytes(kind="PNG", pixels=noise(*sides))
    patches, grid = ours(data, sizes)
    reference = theirs(data, sizes)
    assert reference["image_grid_thw"].tolist() == [list(grid)]
    # The pixels are equal; the two orders of scaling them differ by single roundings of float32.
    torch.testing.assert_close(patches, reference["pixel_values"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK"])
def test_pictures_of_other_modes_become_the_rgb_of_the_processor(mode: str) -> None:
    sink = io.BytesIO()
    Image.fromarray(noise(90, 60)).convert(mode).save(sink, format="JPEG" if mode == "CMYK" else "PNG")
    torch.testing.assert_close(
        ours(sink.getvalue(), PUBLISHED)[0],
        theirs(sink.getvalue(), PUBLISHED)["pixel_values"],
        atol=1e-6,
        rtol=0,
    )


def test_jpeg_decoded_at_full_scale_has_the_patches_of_the_processor() -> None:
    data = image_bytes(kind="JPEG", pixels=noise(641, 427))
    torch.testing.assert_close(
        ours(data, PUBLISHED)[0], theirs(data, PUBLISHED)["pixel_values"], atol=1e-6, rtol=0
    )


def test_jpeg_decoded_at_a_reduced_scale_differs_by_levels_only() -> None:
    rows, columns = np.mgrid[0:1200, 0:1600].astype(np.float64)
    waves = [np.sin(columns / 17 + rows / 23), np.cos(columns / 40), np.sin(rows / 9) * np.cos(columns / 13)]
    data = image_bytes(kind="JPEG", pixels=(127.5 + 120 * np.stack(waves, axis=-1)).astype(np.uint8))
    levels = (ours(data, SMALL)[0] - theirs(data, SMALL)["pixel_values"]).abs() * 0.27 * 255
    # Our choice, for a quarter of the decoding: the mean difference here is 0.27 levels of 255.
    assert 0 < float(levels.mean()) < 1
    assert float(levels.max()) < 4

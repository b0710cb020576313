"""loaders.decode.patches: the layout of the vision encoder, and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaders.decode.patches import grid_pixels, patchify, unpatchify
from omni_pipeline.core.sizes import VisionSizes

SMALL = VisionSizes(patch=3, merge=2, temporal_patch=2)


def numbered(
    grid: tuple[int, int, int], sizes: VisionSizes
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return frames of random values that fill ``grid``."""
    return np.random.default_rng(0).integers(0, 256, (*grid_pixels(grid, sizes), 3), dtype=np.uint8)


def test_patches_are_in_the_order_of_the_definition() -> None:
    """The slow reading of the definition, loop by loop."""
    grid, patch, merge = (2, 4, 6), SMALL.patch, SMALL.merge
    frames = numbered(grid, SMALL)
    expected = []
    for t in range(grid[0]):
        for block_row in range(grid[1] // merge):
            for block_column in range(grid[2] // merge):
                for row_in in range(merge):
                    for column_in in range(merge):
                        top = (block_row * merge + row_in) * patch
                        left = (block_column * merge + column_in) * patch
                        piece = frames[2 * t : 2 * t + 2, top : top + patch, left : left + patch]
                        expected.append(
                            [
                                piece[time, row, column, channel]
                                for channel in range(3)
                                for time in range(2)
                                for row in range(patch)
                                for column in range(patch)
                            ]
                        )
    np.testing.assert_array_equal(patchify(frames, SMALL), np.array(expected, dtype=np.uint8))


@given(
    grid=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    patch=st.integers(1, 4),
    merge=st.integers(1, 3),
    temporal=st.integers(1, 3),
)
def test_unpatchify_takes_back_patchify(
    grid: tuple[int, int, int], patch: int, merge: int, temporal: int
) -> None:
    sizes = VisionSizes(patch=patch, merge=merge, temporal_patch=temporal)
    whole = (grid[0], grid[1] * merge, grid[2] * merge)
    frames = numbered(whole, sizes)
    patches = patchify(frames, sizes)
    assert patches.shape == (np.prod(whole), 3 * temporal * patch * patch)
    np.testing.assert_array_equal(unpatchify(patches, whole, sizes), frames)


def test_frames_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        patchify(np.zeros((2, 6, 7, 3), dtype=np.uint8), SMALL)

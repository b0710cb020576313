"""Frames to patches and back: the layout that the vision encoder reads.

Patches run over time, then block rows, then block columns, then the merge x merge patches inside a block, so
``merge * merge`` consecutive patches make one embedding row. The values of a patch run over channel, time in
the patch, row, column. This is the order of the Qwen2-VL processor.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omni_pipeline.core.sizes import VisionSizes

UInt8Array = npt.NDArray[np.uint8]


def patchify(frames: UInt8Array, sizes: VisionSizes) -> UInt8Array:
    """Return uint8 [patches, 3 * temporal_patch * patch * patch] of ``frames``: uint8 [T, H, W, 3].

    Raises:
        ValueError: T, H or W is no multiple of temporal_patch, or of patch x merge.
    """
    num_frames, height, width, channels = frames.shape
    if num_frames % sizes.temporal_patch or height % sizes.factor or width % sizes.factor:
        raise ValueError(f"frames {frames.shape} do not divide into patches of {sizes}")
    blocks = frames.reshape(
        num_frames // sizes.temporal_patch,
        sizes.temporal_patch,
        height // sizes.factor,
        sizes.merge,
        sizes.patch,
        width // sizes.factor,
        sizes.merge,
        sizes.patch,
        channels,
    )
    ordered = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return np.ascontiguousarray(ordered).reshape(-1, channels * sizes.temporal_patch * sizes.patch**2)


def unpatchify(patches: UInt8Array, grid: tuple[int, int, int], sizes: VisionSizes) -> UInt8Array:
    """Return the frames that ``patchify`` took apart: uint8 [T, H, W, 3]; ``grid`` in patches (t, h, w)."""
    time, rows, columns = grid
    blocks = patches.reshape(
        time,
        rows // sizes.merge,
        columns // sizes.merge,
        sizes.merge,
        sizes.merge,
        3,
        sizes.temporal_patch,
        sizes.patch,
        sizes.patch,
    )
    ordered = blocks.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5)
    return np.ascontiguousarray(ordered).reshape(
        time * sizes.temporal_patch, rows * sizes.patch, columns * sizes.patch, 3
    )


def grid_pixels(grid: tuple[int, int, int], sizes: VisionSizes) -> tuple[int, int, int]:
    """Return (frames, height, width) in pixels of a patch grid."""
    return grid[0] * sizes.temporal_patch, grid[1] * sizes.patch, grid[2] * sizes.patch

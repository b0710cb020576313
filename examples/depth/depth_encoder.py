"""An encoder for depth maps: PNG files of 16 bits, millimetres per pixel, next to their captions.

A map is cut into patches of 16 x 16 pixels; each becomes one embedding row. See docs/encoders.md.
"""

from __future__ import annotations

import io
from typing import BinaryIO

import numpy as np
from PIL import Image

from omni_pipeline.core.errors import SampleError
from omni_pipeline.core.media import MediaEncoder, MediaKind
from omni_pipeline.core.sample import RawSize

PATCH = 16
LAYERS, HIDDEN, HEADS = 2, 64, 4


def measure(file: BinaryIO) -> RawSize:
    """Return the size of a map from its header."""
    width, height = Image.open(file).size
    if min(width, height) < PATCH or max(width, height) > 1024:
        raise SampleError(f"depth map of {width} x {height} pixels", fix=f"sides must be {PATCH} to 1024")
    return RawSize(height=height, width=width)


def grids(raw):
    """Return (frames, rows, columns) of patches of many maps; the rest at the right and below is cut."""
    return np.stack([np.ones_like(raw["height"]), raw["height"] // PATCH, raw["width"] // PATCH], axis=1)


def decode(data: bytes, grid: tuple[int, int, int]):
    """Return the patches of a map in metres, float32 [patches, 256], row by row."""
    _, rows, columns = grid
    metres = np.asarray(Image.open(io.BytesIO(data)), dtype=np.float32) / 1000
    patches = metres[: rows * PATCH, : columns * PATCH].reshape(rows, PATCH, columns, PATCH).swapaxes(1, 2)
    return np.ascontiguousarray(patches).reshape(rows * columns, PATCH * PATCH)


def build(width: int):
    """Return the module; torch is imported here, because decode workers run this file without it."""
    import torch
    from torch import nn
    from torch.nn.functional import gelu, scaled_dot_product_attention

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
            self.qkv, self.out_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.fc1, self.fc2 = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x, lengths):
            qkv = self.qkv(self.norm1(x)).reshape(len(x), 3, HEADS, HIDDEN // HEADS).permute(1, 2, 0, 3)
            # Each frame attends to itself alone, whatever shares the microbatch with it.
            mixed = [scaled_dot_product_attention(*part) for part in qkv.split(lengths, dim=2)]
            x = x + self.out_proj(torch.cat(mixed, dim=1).transpose(0, 1).reshape(len(x), HIDDEN))
            return x + self.fc2(gelu(self.fc1(self.norm2(x))))

    class DepthEncoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Linear(PATCH * PATCH + 2, HIDDEN)  # the depths, and where the patch lies
            self.block_list = nn.ModuleList([Block() for _ in range(LAYERS)])
            self.norm, self.proj = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, width)

        def forward(self, values, grids):
            places = np.concatenate([np.zeros((0, 3)), *(np.argwhere(np.ones(grid)) for grid in grids)])
            places = torch.as_tensor(places[:, 1:] / 64, dtype=values.dtype, device=values.device)
            x = self.patches(torch.cat([values, places], dim=1))
            # Of each frame; the 0, because an encoder also runs where there is nothing to encode.
            lengths = [0, *np.repeat(grids[:, 1] * grids[:, 2], grids[:, 0]).tolist()]
            for block in self.block_list:
                x = block(x, lengths)
            return self.proj(self.norm(x))

    return DepthEncoder()


ENCODER = MediaEncoder(
    kind=MediaKind(
        name="depth",
        suffixes=("depth.png",),
        markers=("<|depth_start|>", "<|depth_pad|>", "<|depth_end|>"),
        unit_values=PATCH * PATCH,
        units_per_row=1,
        measure=measure,
        grids=grids,
        decode=decode,
    ),
    build=build,
    layers=LAYERS,
    hidden=HIDDEN,
    ffn=4 * HIDDEN,
    heads=HEADS,
)

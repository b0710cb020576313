"""The packed vision encoder against one picture at a time with dense masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainer.model.reference import build, gradients, one_picture
from trainer.model.vision import PIXEL_MEAN, PIXEL_STD, VisionEncoder, normalise_patches

# Whole windows of 4 x 4 patches, ragged ones, a single unit, a clip.
GRIDS = [(1, 8, 8), (1, 6, 10), (1, 2, 2), (3, 4, 6)]


def _encoder() -> VisionEncoder:
    encoder = build().encoders["vision"]
    assert isinstance(encoder, VisionEncoder)
    return encoder


def _patches(count: int, *, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 1176), dtype=torch.uint8, generator=random)


def _num_patches(grids: list[tuple[int, int, int]]) -> list[int]:
    return [temporal * rows * columns for temporal, rows, columns in grids]


def test_packed_windows_equal_dense_masks_one_by_one_forward_and_backward() -> None:
    encoder = _encoder()
    counts = _num_patches(GRIDS)
    values = _patches(sum(counts))
    pieces = torch.split(values, counts)
    expected = torch.cat(
        [one_picture(encoder, piece, grid) for piece, grid in zip(pieces, GRIDS, strict=True)]
    )
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected.backward(upstream)
    expected_gradients = gradients(encoder)
    encoder.zero_grad()
    rows = encoder(values, np.array(GRIDS))
    rows.backward(upstream)
    torch.testing.assert_close(rows, expected)
    torch.testing.assert_close(gradients(encoder), expected_gradients)


def test_one_picture_does_not_see_another_nor_one_frame_the_next() -> None:
    encoder = _encoder()
    counts = _num_patches(GRIDS)
    values = _patches(sum(counts))
    changed = values.clone()
    last_frame = sum(counts) - 24
    changed[last_frame:] = _patches(24, seed=5)
    before, after = encoder(values, np.array(GRIDS)), encoder(changed, np.array(GRIDS))
    assert torch.equal(before[: last_frame // 4], after[: last_frame // 4])
    assert not torch.isclose(before[last_frame // 4 :], after[last_frame // 4 :]).all(dim=1).any()


def test_full_attention_blocks_carry_beyond_the_window() -> None:
    encoder = _encoder()
    values = _patches(64)
    changed = values.clone()
    changed[-4:] = 0
    difference = encoder(values, np.array([(1, 8, 8)])) - encoder(changed, np.array([(1, 8, 8)]))
    assert difference[0].abs().max() > 1e-6


def test_no_picture_gives_no_rows_and_zero_gradients_everywhere() -> None:
    encoder = _encoder()
    rows = encoder(_patches(0), np.zeros((0, 3), dtype=np.int64))
    assert rows.shape == (0, 64)
    rows.sum().backward()
    assert all(not gradient.any() for gradient in gradients(encoder).values())


def test_pixels_are_normalised_per_channel() -> None:
    values = torch.tensor([[0, 255, 0, 255, 0, 255]], dtype=torch.uint8)
    expected = [
        (bright - mean) / std for mean, std in zip(PIXEL_MEAN, PIXEL_STD, strict=True) for bright in (0, 1)
    ]
    normalised = normalise_patches(values, dtype=torch.float64)
    torch.testing.assert_close(normalised, torch.tensor([expected], dtype=torch.float64))


def test_grids_that_do_not_count_the_patches_are_refused() -> None:
    with pytest.raises(ValueError, match="grids count 64 patches, there are 60"):
        _encoder()(_patches(60), np.array([(1, 8, 8)]))

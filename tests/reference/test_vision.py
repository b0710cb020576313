"""The vision encoder against the reference: rows, and gradients of every parameter, in float32.

Bound: the defaults of ``assert_close``, on tensors divided by their largest entry. Not in float64: there the
reference still normalises and turns in float32. Pixels have no gradient: ours arrive as bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.reference_thinker import (
    CONFIG,
    Pair,
    assert_equal,
    assert_gradients_equal,
    make_pair,
    pixels_of,
    zero_gradients,
)

Grid = tuple[int, int, int]

PICTURES: dict[str, list[Grid]] = {
    "one row of the LLM": [(1, 2, 2)],
    "one window": [(1, 4, 4)],
    "partial windows": [(1, 6, 10)],
    "a strip one row high": [(1, 2, 14)],
    "images": [(1, 2, 2), (1, 6, 10), (1, 4, 4), (1, 14, 2), (1, 8, 12)],
    "a clip": [(3, 6, 4)],
    "clips and images": [(2, 6, 10), (1, 4, 4), (4, 2, 6), (1, 10, 6)],
}


@functools.cache
def _pair(**vision: Any) -> Pair:
    return make_pair(
        CONFIG.model_validate({**CONFIG.model_dump(), "vision": {**CONFIG.vision.model_dump(), **vision}})
    )


def assert_equals_reference(pair: Pair, grids: list[Grid]) -> None:
    random = np.random.default_rng(1)
    num_patches = int(np.prod(grids, axis=1).sum())
    patches = random.integers(0, 256, (num_patches, pair.config.patch_values), dtype=np.uint8)
    zero_gradients(pair)
    ours = pair.ours.encoders["vision"](torch.from_numpy(patches), np.array(grids))
    pixels = pixels_of(patches).float()
    theirs = pair.theirs.model.visual(pixels, grid_thw=torch.tensor(grids)).pooler_output
    assert ours.shape == theirs.shape
    assert_equal(ours, theirs)
    weights = torch.from_numpy(random.standard_normal(ours.shape, dtype=np.float32))
    torch.autograd.backward((ours * weights).sum())
    torch.autograd.backward((theirs * weights).sum())
    assert_gradients_equal(pair, parts=["encoders.vision."])


@pytest.mark.parametrize("case", PICTURES)
def test_rows_and_gradients_are_those_of_the_reference(case: str) -> None:
    assert_equals_reference(_pair(), PICTURES[case])


@pytest.mark.parametrize("window", [28, 84, 112])
def test_windows_of_any_side_are_cut_as_by_the_reference(window: int) -> None:
    assert_equals_reference(_pair(window=window), PICTURES["clips and images"])


@pytest.mark.parametrize("layers", [(), (0,), (0, 2)])
def test_full_attention_is_in_the_same_blocks(layers: tuple[int, ...]) -> None:
    assert_equals_reference(_pair(full_attention_layers=layers), PICTURES["clips and images"])


def test_patches_of_other_sizes_are_laid_out_likewise() -> None:
    sizes = {"vision": {"patch": 4, "merge": 3, "temporal_patch": 1}}
    config = CONFIG.model_validate({**CONFIG.model_dump(), "sizes": sizes, "vision": {"window": 24}})
    assert_equals_reference(make_pair(config), [(2, 9, 3), (1, 6, 15)])

"""The audio encoder against the reference: rows, and gradients of every parameter and of the mel frames.

Bound: the defaults of ``assert_close``, in float32 on tensors divided by their largest entry, and in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.reference_thinker import (
    CONFIG,
    Pair,
    assert_equal,
    assert_gradients_equal,
    make_pair,
    zero_gradients,
)

RECORDINGS: dict[str, tuple[int, ...]] = {
    "the shortest": (4,),
    "one chunk": (20,),
    "a partial last chunk": (47,),
    "a last chunk of one frame": (41,),
    "an odd count in one chunk": (13,),
    "several": (4, 47, 20, 41, 5, 60, 7),
}


@functools.cache
def _pair(chunk: int, dtype: torch.dtype) -> Pair:
    config = CONFIG.model_validate({**CONFIG.model_dump(), "audio": {"chunk": chunk}})
    pair = make_pair(config, dtype=dtype)
    if dtype == torch.float64:
        # It makes its table of positions in float32 and widens it afterwards.
        table = pair.theirs.model.audio_tower.positional_embedding.positional_embedding
        table.copy_(_sinusoids(*table.shape))
    return pair


def _sinusoids(length: int, width: int) -> Tensor:
    rates = [10_000 ** -(index / (width // 2 - 1)) for index in range(width // 2)]
    rows = [
        [function(place * rate) for function in (math.sin, math.cos) for rate in rates]
        for place in range(length)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def assert_equals_reference(pair: Pair, counts: Sequence[int]) -> None:
    random = torch.Generator().manual_seed(1)
    frames = torch.randn(sum(counts), pair.config.sizes.audio.num_mels, generator=random, dtype=pair.dtype)
    own, other = frames.clone().requires_grad_(), frames.clone().requires_grad_()
    zero_gradients(pair)
    ours = pair.ours.encoders["audio"](own, np.array([(count, 1, 1) for count in counts]))
    tower = pair.theirs.model.audio_tower
    theirs = tower(other.T, feature_lens=torch.tensor(counts)).last_hidden_state
    assert ours.shape == theirs.shape
    assert_equal(ours, theirs)
    weights = torch.randn(ours.shape, generator=random, dtype=pair.dtype)
    torch.autograd.backward((ours * weights).sum())
    torch.autograd.backward((theirs * weights).sum())
    assert_gradients_equal(pair, parts=["encoders.audio."])
    assert own.grad is not None
    assert other.grad is not None
    assert_equal(own.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", RECORDINGS)
def test_rows_and_gradients_are_those_of_the_reference(case: str, dtype: torch.dtype) -> None:
    assert_equals_reference(_pair(20, dtype), RECORDINGS[case])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_of_two_seconds_are_cut_as_by_the_reference(dtype: torch.dtype) -> None:
    assert_equals_reference(_pair(200, dtype), (450, 200, 33, 201))

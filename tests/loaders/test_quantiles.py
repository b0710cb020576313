"""Boundaries from the index: like shares of the tokens, a bounded part of each source, shares of the run."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.bucketing import Buckets
from loaders.bucketing_config import BucketingConfig
from loaders.packing import Budgets
from loaders.quantiles import MOST_ROWS, MOST_SHARDS, quantiles, resolve_buckets, spread
from omni_pipeline.core.sample import Modality
from tests.support.strategies import MemorySource, media_segment, text_segment, text_source

BUDGETS = Budgets(tokens=1000, patches=600)


def resolve(
    sources: Sequence[MemorySource],
    *,
    shares: Sequence[float] = (1.0,),
    by_tokens: bool = True,
    budgets: Budgets = BUDGETS,
    **table: Any,
) -> Buckets:
    return resolve_buckets(
        BucketingConfig(**table), sources, shares, by_tokens=by_tokens, budgets=budgets, oversize="cut"
    )


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 500), min_size=1, max_size=200), count=st.integers(1, 9))
def test_each_bucket_holds_its_share_of_the_tokens_but_for_one_size(sizes: list[int], count: int) -> None:
    found = quantiles(np.array(sizes), np.ones(len(sizes), dtype=np.int64), count)
    assert found[-1] == max(sizes)
    assert list(found) == sorted(set(found))
    for number in range(1, count + 1):
        wanted = Fraction(sum(sizes) * number, count)
        reached = [limit for limit in found if sum(n for n in sizes if n <= limit) >= wanted]
        below = reached[0] - 1
        assert sum(n for n in sizes if n <= below) < wanted, "the least size that reaches it"


def test_quantiles_by_hand() -> None:
    # 10 x 10, 1 x 100, 1 x 200: thirds of 400 tokens end in the 100 and in the 200.
    sizes = np.array([10] * 10 + [100, 200])
    assert quantiles(sizes, np.ones(12, dtype=np.int64), 3) == (100, 200)
    assert quantiles(sizes, np.ones(12, dtype=np.int64), 4) == (10, 100, 200)
    assert quantiles(np.zeros(3, dtype=np.int64), np.ones(3, dtype=np.int64), 4) == ()


def test_the_last_boundary_is_what_a_pack_can_hold() -> None:
    source = text_source("text", [12], [10] * 10 + [100, 200])
    assert resolve([source], quantiles=4).boundaries == (10, 100, 200, 1000)
    assert resolve([source], boundaries=[256]).boundaries == (256, 1000)
    assert resolve([source], boundaries=[256, 1000]).boundaries == (256, 1000)
    assert resolve([source], boundaries=[256]).patch_boundaries == ()


def test_samples_are_measured_as_a_pack_holds_them() -> None:
    # The long one is cut to 1000 tokens; the picture with too many patches is in no pack.
    source = MemorySource(
        "mixed",
        [3],
        [[text_segment(5000)], [media_segment(Modality.IMAGE, (1, 40, 40))], [text_segment(499)]],
    )
    assert resolve([source], quantiles=3).boundaries == (500, 1000)


@pytest.mark.parametrize(("by_tokens", "first"), [(True, 10), (False, 400)])
def test_sources_count_by_their_shares_in_the_unit_of_the_weights(by_tokens: bool, first: int) -> None:
    short, long = text_source("a", [50], [10]), text_source("b", [4000], [400])
    shares = (0.6, 0.4)
    assert resolve([short, long], shares=shares, by_tokens=by_tokens, quantiles=2).boundaries[0] == first
    assert resolve([short, long], shares=(1.0, 0.0), quantiles=2).boundaries == (10, 1000)


def test_buckets_by_patches_have_one_for_samples_without_and_end_at_the_budget() -> None:
    parts = [
        [media_segment(Modality.IMAGE, (1, side, side)), text_segment(3)] for side in (2, 2, 2, 4, 8, 20)
    ]
    source = MemorySource("pictures", [12], [*parts, *[[text_segment(9)]] * 6])
    found = resolve([source], boundaries=[100], patch_quantiles=2)
    # 12, 16, 64 and 400 patches: half of the 492 lie in the largest.
    assert found.patch_boundaries == (0, 400, 600)
    assert resolve([source], boundaries=[100], patch_quantiles=8).patch_boundaries == (0, 64, 400, 600)
    assert resolve([source], quantiles=2, patch_boundaries=[50]).patch_boundaries == (0, 50, 600)


@settings(deadline=None)
@given(shard_sizes=st.lists(st.sampled_from([0, 1, 3, 5000, 10**6]), min_size=1, max_size=30))
def test_what_is_looked_at_is_bounded_distinct_and_spread_over_the_source(shard_sizes: list[int]) -> None:
    ordinals = spread(shard_sizes)
    assert len(ordinals) <= MOST_ROWS
    assert len(np.unique(ordinals)) == len(ordinals)
    assert bool(len(ordinals)) == bool(sum(shard_sizes))
    ends = np.cumsum(shard_sizes)
    shards = np.unique(np.searchsorted(ends, ordinals, side="right"))
    filled = [number for number, size in enumerate(shard_sizes) if size]
    assert len(shards) == min(MOST_SHARDS, len(filled))
    assert set(shards.tolist()) <= set(filled)


def test_a_small_source_is_looked_at_whole() -> None:
    assert spread([3, 0, 4]).tolist() == list(range(7))
    assert spread([]).tolist() == []

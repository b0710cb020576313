"""Bucket boundaries from the index: buckets that hold like shares of the tokens (or patches) of a run.

By tokens, not by samples: with as many *samples* in each, the last bucket reaches from the few longest ones
to the whole sequence, and its padding outweighs all others (log-normal lengths, 8 buckets: 66 % of the
positions against 30 %).

Only a bounded part of each source is looked at, the same on every rank and in every run: rows evenly spaced
in shards evenly spaced. So a start does not open a large index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from loaders.bucketing import Buckets
from loaders.bucketing_config import BucketingConfig
from loaders.fitting import IntArray, Oversize, PackSizes, fit
from loaders.packing import Budgets

MOST_SHARDS = 8
"""Shards of a source that are looked at."""
MOST_ROWS = 4096
"""Rows of a source that are looked at."""
WEIGHT_UNIT = 1 << 36
"""Weight of a share of 1: sums stay below 2^63 for samples of up to 100 million tokens."""


class MeasuredSource(Protocol):
    """What is needed of a source; see ``loaders.lane_cursor.SampleSource``."""

    @property
    def shard_sizes(self) -> Sequence[int]:
        """Rows of each shard."""
        ...

    def sizes(self, ordinals: IntArray) -> PackSizes:
        """Return what these rows take of a pack."""
        ...


def resolve_buckets(
    config: BucketingConfig,
    sources: Iterable[MeasuredSource],
    shares: Iterable[float],
    *,
    by_tokens: bool,
    budgets: Budgets,
    oversize: Oversize,
) -> Buckets:
    """Return the buckets that ``config`` asks for.

    Args:
        config: Boundaries or quantiles.
        sources: Read only for quantiles.
        shares: Of each source over the run.
        by_tokens: Whether shares are of tokens, else of samples.
        budgets: Of one pack: the last boundaries.
        oversize: What happens to samples that no pack can hold as they are.
    """
    tokens, patches = config.boundaries or (), config.patch_boundaries or ()
    if config.quantiles is not None or config.patch_quantiles is not None:
        measured = [
            _measure(source, share, by_tokens=by_tokens, budgets=budgets, oversize=oversize)
            for source, share in zip(sources, shares, strict=True)
            if share > 0
        ]
        lengths, amounts, weights = (np.concatenate(part) for part in zip(*measured, strict=True))
        if config.quantiles is not None:
            tokens = quantiles(lengths, weights, config.quantiles)
        if config.patch_quantiles is not None:
            patches = quantiles(amounts, weights, config.patch_quantiles)
    return Buckets(
        boundaries=tuple(sorted({*tokens, budgets.tokens})),
        patch_boundaries=tuple(sorted({0, *patches, budgets.patches})) if config.by_patches else (),
    )


def quantiles(sizes: IntArray, weights: IntArray, count: int) -> tuple[int, ...]:
    """Return the sizes up to which 1, 2, ... ``count`` of ``count`` like shares of the total size lie.

    Args:
        sizes: Of each sample; those of size 0 count nothing.
        weights: How often each sample comes; whole numbers, so that all machines get the same sums.
        count: Number of shares; equal sizes are returned once.
    """
    order = np.argsort(sizes, kind="stable")
    ends = np.cumsum(sizes[order] * weights[order])
    total = int(ends[-1]) if len(ends) else 0
    if not total:
        return ()
    wanted = [-(-total * number // count) for number in range(1, count + 1)]
    return tuple(np.unique(sizes[order][np.searchsorted(ends, wanted)]).tolist())


def spread(shard_sizes: Sequence[int]) -> IntArray:
    """Return the ordinals to look at: at most MOST_ROWS, evenly spaced in at most MOST_SHARDS shards."""
    sizes = np.asarray(shard_sizes, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    filled = np.flatnonzero(sizes)
    shards = filled[_evenly(len(filled), MOST_SHARDS)]
    rows = [starts[shard] + _evenly(int(sizes[shard]), MOST_ROWS // len(shards)) for shard in shards]
    return np.concatenate([np.zeros(0, dtype=np.int64), *rows])


def _evenly(count: int, most: int) -> IntArray:
    """Return at most ``most`` of the numbers below ``count``, evenly spaced."""
    chosen = min(count, most)
    return np.arange(chosen, dtype=np.int64) * count // max(1, chosen)


def _measure(
    source: MeasuredSource, share: float, *, by_tokens: bool, budgets: Budgets, oversize: Oversize
) -> tuple[IntArray, IntArray, IntArray]:
    """Return (tokens, patches, weight) of the rows looked at that a pack can hold."""
    sizes = source.sizes(spread(source.shard_sizes))
    tokens, fits = fit(sizes, budgets, oversize=oversize)
    tokens = tokens[fits]
    total = int(tokens.sum()) if by_tokens else len(tokens)
    weight = max(1, round(WEIGHT_UNIT * share / max(1, total)))
    return tokens, sizes.patches[fits], np.full(len(tokens), weight, dtype=np.int64)

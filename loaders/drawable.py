"""A source of which nothing can ever be drawn is a mistake of the settings: found before the run starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from loaders.fitting import DENIED, FILTERED, UNUSABLE, USABLE, IntArray, PackSizes, fit, misfit
from loaders.lane_cursor import SampleSource
from loaders.order_config import OrderConfig
from omni_pipeline.core.errors import ConfigError

ROWS_AT_ONCE = 4096
MOST_ROWS = 1 << 20
"""Rows looked at before a source is taken to be good; its lanes find out otherwise."""


def check_drawable(sources: Iterable[SampleSource], config: OrderConfig) -> None:
    """Raise unless every source has a row that can be drawn; stops at the first of each.

    Raises:
        ConfigError: Names the source, and its smallest sample and the limit, or why rows are left out.
    """
    for source in sources:
        _check(source, config)


def _check(source: SampleSource, config: OrderConfig) -> None:
    num_rows = sum(source.shard_sizes)
    looked_at = min(num_rows, MOST_ROWS)
    statuses: Counter[int] = Counter()
    smallest: tuple[float, int] | None = None
    unusable: int | None = None
    for first in range(0, looked_at, ROWS_AT_ONCE):
        ordinals = np.arange(first, min(first + ROWS_AT_ONCE, looked_at), dtype=np.int64)
        sizes = source.sizes(ordinals)
        if fit(sizes, config.budgets, oversize=config.oversize)[1].any():
            return
        statuses.update(sizes.status.tolist())
        found = _smallest(sizes, ordinals, config)
        if found is not None and (smallest is None or found < smallest):
            smallest = found
        bad = np.flatnonzero(sizes.status == UNUSABLE)
        if unusable is None and len(bad):
            unusable = int(ordinals[bad[0]])
    if looked_at < num_rows or not num_rows:
        return
    if smallest is not None:
        raise _nothing_fits(source, smallest[1], statuses, config)
    raise _nothing_usable(source, unusable, statuses)


def _smallest(sizes: PackSizes, ordinals: IntArray, config: OrderConfig) -> tuple[float, int] | None:
    """Return (share of the tightest budget, ordinal) of the usable row that is nearest to fitting."""
    usable = np.flatnonzero(sizes.status == USABLE)
    if not len(usable):
        return None
    budgets = config.budgets
    tokens = sizes.tokens if config.oversize == "drop" else sizes.cut_tokens
    shares = np.maximum.reduce(
        [
            tokens[usable] / budgets.tokens,
            sizes.patches[usable] / budgets.patches,
            sizes.mel_frames[usable] / budgets.mel_frames,
        ]
    )
    best = int(shares.argmin())
    return float(shares[best]), int(ordinals[usable[best]])


def _nothing_fits(
    source: SampleSource, ordinal: int, statuses: Counter[int], config: OrderConfig
) -> ConfigError:
    sizes = source.sizes(np.array([ordinal], dtype=np.int64))
    reason = misfit(sizes, 0, budgets=config.budgets, oversize=config.oversize)
    _, key, shard = source.identify(ordinal)
    return ConfigError(
        f"none of {statuses[USABLE]} samples fits a pack; the smallest has {reason}",
        where=f"source {source.name!r}, {shard}, sample {key}",
        fix="raise the limit named above, or remove the source",
    )


def _nothing_usable(source: SampleSource, unusable: int | None, statuses: Counter[int]) -> ConfigError:
    reasons = [
        f"{statuses[status]} {text}"
        for status, text in ((FILTERED, "left out by `where`"), (DENIED, "denied"), (UNUSABLE, "unusable"))
        if statuses[status]
    ]
    example = ""
    if unusable is not None:
        _, key, shard = source.identify(unusable)
        example = f" ({shard}, sample {key}: {source.problem(unusable)})"
    return ConfigError(
        f"no sample can be drawn: of {statuses.total()} rows {', '.join(reasons)}{example}",
        where=f"source {source.name!r}",
        fix="widen its `where` and deny-lists, mend its shards, or remove the source",
    )

"""Long-short sequence parallelism: which media segments are shared by a subgroup, and by how many ranks.

A segment longer than the mean load bounds the makespan however the others are placed: only sharing it helps.
The idea is that of MegaScale-Omni (Xue et al. 2026, arXiv 2605.08962), which publishes no threshold; the
search is ours. Sort the segments by cost; for some k take the k longest as long, each at the least degree
whose shares fall under a target near the mean load. Each such set has a lower bound (its largest share or
whole segment, or its mean load with what sharing adds), so the most promising sets are tried first and most
are never tried. k = 0 is always among them: with packs so placed, no microbatch is longer in the model than
the best found without sharing. Which placements of packs are tried may differ with sharing, and with it the
step, where exchanges are most of its time.

A cap of bytes per rank, or a fixed threshold (to compare with), forces some segments long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from balancer.encoding import MediaLoad, Shares, ShareTable
from balancer.partition import FloatArray, IntArray

DEGREES = (2, 4, 8)
# Segments below this part of the mean load can be balanced whole.
NEAR_MEAN = 0.5
# k: all of the first few, then the number of segments above so many mean loads.
FIRST_COUNTS = 8
COUNT_LEVELS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
# Shares aim below so many mean loads: small ones fill gaps, large ones cost least.
TARGETS = (0.25, 0.5, 1.0, 1.5, 2.0)


class LsspConfig(BaseModel):
    """The ``balance.lssp`` section of a run file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["auto", "off", "fixed"] = Field(
        "auto",
        description="Which media segments several ranks of a node share: 'auto' by modelled time, 'fixed' "
        "all from min_rows on (to compare with), 'off' none.",
    )
    max_degree: Literal[2, 4, 8] = Field(
        8, description="Most ranks that share one segment; fewer where a node has fewer of a group."
    )
    min_rows: int = Field(
        0, ge=0, description="Embedding rows from which kind = 'fixed' shares a segment at max_degree."
    )

    @model_validator(mode="after")
    def _threshold_of_its_kind(self) -> LsspConfig:
        if (self.kind == "fixed") != (self.min_rows > 0):
            raise ValueError("min_rows goes with kind = 'fixed', above 0")
        return self

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees that may be used, ascending."""
        return () if self.kind == "off" else tuple(d for d in DEGREES if d <= self.max_degree)


@dataclass(frozen=True, slots=True)
class Overflow:
    """A segment that is above the cap however it is shared: its number and the bytes of its largest share."""

    item: int
    num_bytes: int


def forced_degrees(
    num_rows: Sequence[int],
    num_bytes: FloatArray,
    *,
    shares: ShareTable,
    degrees: Sequence[int],
    min_rows: int,
    max_bytes: float,
) -> tuple[IntArray, list[Overflow]]:
    """Return the least degree that each segment must have, int64 [n], and those that never fit.

    Args:
        num_rows: Embedding rows of each segment.
        num_bytes: float64 [n]; activations of each, encoded whole.
        shares: How a segment divides.
        degrees: That the group has subgroups for, ascending.
        min_rows: From so many rows on a segment is shared at the largest degree; 0 is never.
        max_bytes: Most bytes of a rank; infinite without a cap.
    """
    forced = np.ones(len(num_rows), dtype=np.int64)
    overflows = []
    for item, rows in enumerate(num_rows):
        too_large, too_long = num_bytes[item] > max_bytes, 0 < min_rows <= rows
        if not (too_large or too_long):
            continue
        found = [(degree, share) for degree in degrees if (share := shares(item, degree)) is not None]
        fitting = [degree for degree, share in found if share.num_bytes.max() <= max_bytes]
        if fitting:
            forced[item] = fitting[-1] if too_long else fitting[0]
        elif too_large:
            least = min([float(num_bytes[item]), *(float(share.num_bytes.max()) for _, share in found)])
            overflows.append(Overflow(item, round(least)))
    return forced, overflows


@dataclass(frozen=True, slots=True)
class LongSet:
    """A choice of long segments: ``degrees`` int64 [n], and what no placement of it can go below."""

    degrees: IntArray
    bound: float


def long_sets(load: MediaLoad, forced: IntArray) -> list[LongSet]:
    """Return choices of long segments, the most promising first; that of ``forced`` alone is not among them.

    Args:
        load: The segments of a microbatch.
        forced: int64 [n]; least degree of each.
    """
    table = _table(load, forced)
    found: dict[bytes, LongSet] = {}
    for count in _counts(table.costs[:, 0], load.mean):
        for choice in _choices(table, forced, count, load):
            found.setdefault(choice.degrees.tobytes(), choice)
    found.pop(forced.tobytes(), None)
    return sorted(found.values(), key=lambda choice: (choice.bound, int(choice.degrees.sum())))


@dataclass(frozen=True, slots=True)
class _Table:
    """What each degree makes of the segments that may become long, longest first.

    Args:
        largest: float64 [n]; largest share of every segment of the load at its least degree.
        totals: float64 [n]; sum of those shares.
        items: int64 [m]; the segments that may become long.
        degrees: int64 [columns]; the first is 1.
        costs: float64 [m, columns]; their largest share; infinite where it cannot be divided so.
        sums: float64 [m, columns]; the sum of the shares.
    """

    largest: FloatArray
    totals: FloatArray
    items: IntArray
    degrees: IntArray
    costs: FloatArray
    sums: FloatArray


def _table(load: MediaLoad, forced: IntArray) -> _Table:
    largest, totals = load.costs.copy(), load.costs.copy()
    for item in np.flatnonzero(forced > 1).tolist():
        largest[item], totals[item] = _largest_and_sum(load.shares(item, int(forced[item])))
    order = np.argsort(-load.costs, kind="stable")
    near = order[load.costs[order] > NEAR_MEAN * load.mean].tolist()
    degrees = sorted(load.subgroups)
    rows = [
        [
            _largest_and_sum(load.shares(item, degree) if degree >= forced[item] else None)
            for degree in degrees
        ]
        for item in near
    ]
    pairs = np.asarray(rows, dtype=np.float64).reshape(len(near), len(degrees), 2)
    divides = np.isfinite(pairs[:, :, 0]).any(axis=1)
    items = np.asarray(near, dtype=np.int64)[divides]
    whole = load.costs[items][:, None]
    return _Table(
        largest=largest,
        totals=totals,
        items=items,
        degrees=np.asarray([1, *degrees], dtype=np.int64),
        costs=np.concatenate([whole, pairs[divides, :, 0]], axis=1),
        sums=np.concatenate([whole, pairs[divides, :, 1]], axis=1),
    )


def _largest_and_sum(shares: Shares | None) -> tuple[float, float]:
    if shares is None:
        return np.inf, np.inf
    # A few numbers: a list is quicker than an array.
    costs = shares.costs.tolist()
    return max(costs), sum(costs)


def _counts(costs: FloatArray, mean: float) -> list[int]:
    """How many of the longest to try; ``costs`` falls."""
    levels = (int((costs > level * mean).sum()) for level in COUNT_LEVELS)
    return sorted({*range(1, 1 + min(FIRST_COUNTS, len(costs))), *levels} - {0})


def _choices(table: _Table, forced: IntArray, count: int, load: MediaLoad) -> Iterator[LongSet]:
    """The ``count`` longest are long, each at the least degree that keeps its shares under a target."""
    items, costs, sums = table.items[:count], table.costs[:count, 1:], table.sums[:count, 1:]
    rest = np.ones(len(forced), dtype=bool)
    rest[items] = False
    atom, total_rest = float(table.largest[rest].max(initial=0.0)), float(table.totals[rest].sum())
    row = np.arange(count)
    # Shares need not be smaller than what stays whole, so several targets may be one.
    for target in dict.fromkeys(max(target * load.mean, atom) for target in TARGETS):
        is_small = costs <= target
        column = np.where(is_small.any(axis=1), is_small.argmax(axis=1), costs.argmin(axis=1))
        degrees = forced.copy()
        degrees[items] = table.degrees[1:][column]
        total = total_rest + float(sums[row, column].sum())
        yield LongSet(degrees, max(float(costs[row, column].max()), atom, total / load.num_members))

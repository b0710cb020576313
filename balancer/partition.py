"""Costs into bins: pure functions from a float array to an array of bin numbers.

All are deterministic: equal costs go in order of index, equal loads in order of bin. Give costs that are
whole numbers (below 2^53 in sum) where several machines must agree: their sums are then exact in any order.

LPT: Graham 1969, makespan <= (4/3 - 1/(3m)) x optimum for m bins; moves and swaps then lower it, and MULTIFIT
(Coffman, Garey and Johnson 1978) mends what they leave when there are few items per bin. Equal-count LPT and
Karmarkar-Karp were measured against this and left out: see ``docs/balance.md``.
"""

from __future__ import annotations

import bisect
import heapq

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Refinement ends this close to the lower bound: modelled costs are less exact than that.
CLOSE_ENOUGH = 2e-3
# Refinement takes at most so many rounds, or one per bin if that is more.
MIN_REFINE_ROUNDS = 32
# Pairs of items looked at in one go, about a millisecond.
MAX_CELLS = 1 << 18
# With more items refined LPT is close to the bound, and MULTIFIT would take milliseconds.
MAX_MULTIFIT_ITEMS = 1024
MULTIFIT_STEPS = 6


def bin_loads(costs: FloatArray, bins: IntArray, num_bins: int) -> FloatArray:
    """Return the load of each bin, float64 [num_bins]."""
    loads: FloatArray = np.bincount(bins, weights=costs, minlength=num_bins).astype(np.float64)
    return loads


def makespan(costs: FloatArray, bins: IntArray, num_bins: int) -> float:
    """Return the largest load; 0 without items."""
    return float(bin_loads(costs, bins, num_bins).max(initial=0.0))


def lower_bound(costs: FloatArray, num_bins: int) -> float:
    """Return what no assignment can go below.

    The largest of: the mean load; the largest item; and for each k the k + 1 smallest of the k x num_bins + 1
    largest items, because some bin holds k + 1 of those. Whole numbers give an exact bound.
    """
    if not len(costs):
        return 0.0
    falling = np.sort(costs)[::-1]
    sums = np.concatenate(([0.0], np.cumsum(falling)))
    last = np.arange(num_bins, len(costs), num_bins)
    crowded = sums[last + 1] - sums[last - np.arange(1, len(last) + 1)]
    return max(float(sums[-1]) / num_bins, float(falling[0]), float(crowded.max(initial=0.0)))


def lpt(costs: FloatArray, num_bins: int, *, loads: FloatArray | None = None) -> IntArray:
    """Assign the longest item first, always to the least loaded bin.

    Without ``loads`` the makespan is at most (4/3 - 1/(3 num_bins)) times the optimum (Graham 1969).

    Args:
        costs: float64 [n], not negative.
        num_bins: At least 1.
        loads: float64 [num_bins]; what the bins hold already.

    Returns:
        int64 [n], the bin of each item.
    """
    _check(costs, num_bins)
    start = [0.0] * num_bins if loads is None else loads.tolist()
    heap = [(load, number) for number, load in enumerate(start)]
    heapq.heapify(heap)
    order = np.argsort(-costs, kind="stable")
    found = []
    for cost in costs[order].tolist():
        load, number = heap[0]
        found.append(number)
        heapq.heapreplace(heap, (load + cost, number))
    bins = np.empty(len(costs), dtype=np.int64)
    bins[order] = found
    return bins


def refine(costs: FloatArray, bins: IntArray, num_bins: int, *, fixed: FloatArray | None = None) -> IntArray:
    """Lower the makespan by moves and swaps of single items, until it is close to the lower bound.

    A round pairs the heaviest bin with the lightest, the next with the next, as far as bins are too heavy,
    and does the best move or swap of each pair. Only if none helps the heaviest bin it gives an item to, or
    swaps one with, any bin. Never raises the makespan.

    Args:
        costs: float64 [n], not negative.
        bins: int64 [n]; where they are.
        num_bins: At least 1.
        fixed: float64 [num_bins]; what the bins hold besides, and keep.

    Returns:
        int64 [n], a new array.
    """
    bins = bins.copy()
    loads = bin_loads(costs, bins, num_bins)
    bound = lower_bound(costs, num_bins)
    if fixed is not None:
        loads += fixed
        bound = max(bound, float(loads.sum()) / num_bins, float(fixed.max()))
    limit = bound * (1 + CLOSE_ENOUGH)
    for _ in range(max(MIN_REFINE_ROUNDS, num_bins)):
        by_load = np.argsort(-loads, kind="stable")
        num_pairs = min(int((loads > limit).sum()), num_bins // 2)
        if num_pairs == 0:
            break
        heavy, light = by_load[:num_pairs], by_load[::-1][:num_pairs]
        if _exchange_pairs(costs, bins, loads, heavy, light)[0]:
            continue
        if not _exchange_with_any(costs, bins, loads, heavy[0], light[0]):
            break
    return bins


def multifit(costs: FloatArray, start: IntArray, num_bins: int) -> IntArray:
    """Bisect a capacity between the lower bound and the makespan of ``start``; pack by best fit decreasing.

    MULTIFIT of Coffman, Garey and Johnson 1978, with best fit in place of first fit: a sorted list finds
    it in O(log num_bins). Never worse than ``start``.

    Returns:
        int64 [n], the bin of each item.
    """
    order = np.argsort(-costs, kind="stable")
    values = costs[order].tolist()
    bins, low, high = start, lower_bound(costs, num_bins), makespan(costs, start, num_bins)
    for _ in range(MULTIFIT_STEPS):
        if high <= low * (1 + CLOSE_ENOUGH):
            break
        capacity = (low + high) / 2
        found = _best_fit(values, num_bins, capacity)
        if found is None:
            low = capacity
        else:
            bins = np.empty(len(values), dtype=np.int64)
            bins[order] = found
            high = makespan(costs, bins, num_bins)
    return bins


def balance(costs: FloatArray, num_bins: int) -> IntArray:
    """Return refined LPT, or if that stays off the lower bound the better of it and refined MULTIFIT.

    Within (4/3 - 1/(3 num_bins)) times the optimum, in practice within a thousandth of the lower bound.

    Returns:
        int64 [n], the bin of each item.
    """
    bins = refine(costs, lpt(costs, num_bins), num_bins)
    reached = makespan(costs, bins, num_bins)
    if len(costs) <= MAX_MULTIFIT_ITEMS and reached > lower_bound(costs, num_bins) * (1 + CLOSE_ENOUGH):
        other = refine(costs, multifit(costs, bins, num_bins), num_bins)
        if makespan(costs, other, num_bins) < reached:
            return other
    return bins


def _best_fit(values: list[float], num_bins: int, capacity: float) -> list[int] | None:
    """Put each value into the fullest bin with room for it; None if one finds no room."""
    rooms = [(capacity, number) for number in range(num_bins)]
    found = []
    for value in values:
        place = bisect.bisect_left(rooms, (value, -1))
        if place == num_bins:
            return None
        room, number = rooms.pop(place)
        bisect.insort(rooms, (room - value, number), 0, place)
        found.append(number)
    return found


def _exchange_pairs(
    costs: FloatArray, bins: IntArray, loads: FloatArray, heavy: IntArray, light: IntArray
) -> BoolArray:
    """Do the best move or swap between each heavy bin and its light one, if it lowers the heavy one.

    Args:
        costs: float64 [n].
        bins: int64 [n]; changed in place.
        loads: float64 [bins]; changed in place.
        heavy: int64 [pairs].
        light: int64 [pairs]; none of ``heavy``.

    Returns:
        bool [pairs], whether something changed.
    """
    # numpy sorts numbers of two bytes by radix, several times as fast.
    order = np.argsort(bins.astype(np.int16) if len(loads) < 1 << 15 else bins, kind="stable")
    counts = np.bincount(bins, minlength=len(loads))
    first = np.cumsum(counts) - counts
    widths = int(counts[heavy].max()), int(counts[light].max(initial=0))
    # All pairs at once, but for a few bins with very many items.
    num_pairs = max(1, min(len(heavy), MAX_CELLS // (widths[0] * (widths[1] + 1))))
    heavy, light = heavy[:num_pairs], light[:num_pairs]
    given, given_costs = _rows(costs, order, first[heavy], counts[heavy])
    taken, taken_costs = _rows(costs, order, first[light], counts[light])
    # Column 0 is a move (nothing comes back), the others are swaps. Places without an item cost nothing: as
    # something given they do not help, as something taken they are the move.
    back = np.zeros((num_pairs, 1 + taken_costs.shape[1]))
    back[:, 1:] = taken_costs
    shift = given_costs[:, :, None] - back[:, None, :]
    reached = np.maximum(loads[heavy][:, None, None] - shift, loads[light][:, None, None] + shift)
    reached = reached.reshape(num_pairs, -1)
    best, pair = reached.argmin(axis=1), np.arange(num_pairs)
    helps: BoolArray = reached[pair, best] < loads[heavy]
    if not helps.any():
        return helps
    row, column = np.divmod(best, back.shape[1])
    bins[given[pair, row][helps]] = light[helps]
    swaps = np.flatnonzero(helps & (column > 0))
    bins[taken[swaps, column[swaps] - 1]] = heavy[swaps]
    moved = np.where(helps, shift[pair, row, column], 0.0)
    loads[heavy] -= moved
    loads[light] += moved
    return helps


def _rows(
    costs: FloatArray, order: IntArray, first: IntArray, counts: IntArray
) -> tuple[IntArray, FloatArray]:
    """Return the items of some bins and their costs, [bins, most items of one], filled up with costs of 0."""
    place = np.arange(int(counts.max(initial=0)))
    items = order[np.minimum(first[:, None] + place, len(order) - 1)]
    return items, costs[items] * (place < counts[:, None])


def _exchange_with_any(costs: FloatArray, bins: IntArray, loads: FloatArray, heavy: int, light: int) -> bool:
    """Do the best swap of the heavy bin with any, or move to the light one, if it lowers the heavy one."""
    given, taken = np.flatnonzero((bins == heavy) & (costs > 0)), np.flatnonzero(bins != heavy)
    if not len(given) or len(given) * len(taken) > MAX_CELLS:
        return False
    shift = costs[given][:, None] - np.concatenate(([0.0], costs[taken]))[None, :]
    target = np.concatenate(([light], bins[taken]))
    reached = np.maximum(loads[heavy] - shift, loads[target] + shift)
    row, column = divmod(int(reached.argmin()), reached.shape[1])
    if reached[row, column] >= loads[heavy]:
        return False
    bins[given[row]] = target[column]
    if column:
        bins[taken[column - 1]] = heavy
    loads[heavy] -= shift[row, column]
    loads[target[column]] += shift[row, column]
    return True


def _check(costs: FloatArray, num_bins: int) -> None:
    if num_bins < 1:
        raise ValueError(f"num_bins is {num_bins}, must be at least 1")
    if len(costs) and not (np.isfinite(costs).all() and costs.min() >= 0):
        raise ValueError(f"costs must be finite and not negative, got {costs.min()} .. {costs.max()}")

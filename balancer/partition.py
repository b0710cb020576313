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

# Refinement ends this close to the lower bound: modelled costs are less exact than that.
CLOSE_ENOUGH = 1e-3
# Refinement takes at least this many steps, and one per bin.
MIN_REFINE_STEPS = 32
# Swaps with all bins are looked at only up to so many pairs of items, about a millisecond.
MAX_SWAP_PAIRS = 1 << 18
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
    bins = np.zeros(len(costs), dtype=np.int64)
    values = costs.tolist()
    for item in _longest_first(costs):
        load, number = heap[0]
        bins[item] = number
        heapq.heapreplace(heap, (load + values[item], number))
    return bins


def refine(costs: FloatArray, bins: IntArray, num_bins: int, *, fixed: FloatArray | None = None) -> IntArray:
    """Lower the makespan by moves and swaps of single items, until it is close to the lower bound.

    Each step takes from the heaviest bin: the best move to the lightest bin or swap with it, and only if none
    helps the best swap with any bin. Never raises the makespan. A step costs O(n + pairs of items looked at).

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
    for _ in range(max(MIN_REFINE_STEPS, num_bins)):
        heavy, light = int(loads.argmax()), int(loads.argmin())
        if loads[heavy] <= limit:
            break
        given = np.flatnonzero((bins == heavy) & (costs > 0))
        if not _exchange(costs, bins, loads, given, np.flatnonzero(bins == light), (heavy, light)):
            others = np.flatnonzero(bins != heavy)
            if len(given) * len(others) > MAX_SWAP_PAIRS:
                break
            if not _exchange(costs, bins, loads, given, others, (heavy, light)):
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


def _exchange(
    costs: FloatArray,
    bins: IntArray,
    loads: FloatArray,
    given: IntArray,
    taken: IntArray,
    ends: tuple[int, int],
) -> bool:
    """Do the best move of one of ``given``, or swap for one of ``taken``, if it lowers the heavy bin.

    Args:
        costs: float64 [n].
        bins: int64 [n]; changed in place.
        loads: float64 [bins]; changed in place.
        given: Items of the heavy bin.
        taken: Items of other bins.
        ends: The heavy bin, and the bin for an item that moves without a swap.

    Returns:
        Whether anything changed.
    """
    heavy, light = ends
    # Column 0 is a move (nothing comes back), the others are swaps.
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


def _longest_first(costs: FloatArray) -> list[int]:
    order: list[int] = np.argsort(-costs, kind="stable").tolist()
    return order


def _check(costs: FloatArray, num_bins: int) -> None:
    if num_bins < 1:
        raise ValueError(f"num_bins is {num_bins}, must be at least 1")
    if len(costs) and not (np.isfinite(costs).all() and costs.min() >= 0):
        raise ValueError(f"costs must be finite and not negative, got {costs.min()} .. {costs.max()}")

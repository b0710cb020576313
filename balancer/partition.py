"""Costs into bins: pure functions from a float array to an array of bin numbers.

All are deterministic: equal costs go in order of index, equal loads in order of bin. Give costs that are
whole numbers (below 2^53 in sum) where several machines must agree: their sums are then exact in any order.

LPT: Graham 1969, makespan <= (4/3 - 1/(3m)) x optimum for m bins. Differencing: Karmarkar and Karp 1982, no
better worst case but far smaller differences when there are many items.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Differencing costs items x bins; above this LPT with refinement is as good and much faster.
MAX_DIFFERENCING_CELLS = 8192


def bin_loads(costs: FloatArray, bins: IntArray, num_bins: int) -> FloatArray:
    """Return the load of each bin, float64 [num_bins]."""
    loads: FloatArray = np.bincount(bins, weights=costs, minlength=num_bins).astype(np.float64)
    return loads


def makespan(costs: FloatArray, bins: IntArray, num_bins: int) -> float:
    """Return the largest load; 0 without items."""
    return float(bin_loads(costs, bins, num_bins).max(initial=0.0))


def lower_bound(costs: FloatArray, num_bins: int) -> float:
    """Return what no assignment can go below: the mean load, or the largest item."""
    return max(float(costs.sum()) / num_bins, float(costs.max(initial=0.0)))


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


def lpt_equal_count(costs: FloatArray, num_bins: int) -> IntArray:
    """Assign longest first with item counts that differ by at most one between bins.

    A heuristic: the bound of LPT does not hold, because a light bin may be full. No bin is heavier than
    ceil(n / num_bins) times the largest item.

    Returns:
        int64 [n], the bin of each item.
    """
    _check(costs, num_bins)
    smallest, num_larger = divmod(len(costs), num_bins)
    heap = [(0.0, number) for number in range(num_bins)]
    counts = [0] * num_bins
    bins = np.zeros(len(costs), dtype=np.int64)
    values = costs.tolist()
    for item in _longest_first(costs):
        load, number = heapq.heappop(heap)
        while counts[number] == smallest and num_larger == 0:
            load, number = heapq.heappop(heap)
        num_larger -= counts[number] == smallest
        bins[item] = number
        counts[number] += 1
        if counts[number] <= smallest:
            heapq.heappush(heap, (load + values[item], number))
    return bins


def karmarkar_karp(costs: FloatArray, num_bins: int) -> IntArray:
    """Join the two partial partitions of largest difference, heavy bins with light ones, until one is left.

    Takes O(n num_bins log num_bins). For two bins the makespan is at most 7/6 of the optimum
    (Fischetti and Martello 1987).

    Returns:
        int64 [n], the bin of each item.
    """
    _check(costs, num_bins)
    bins = np.zeros(len(costs), dtype=np.int64)
    if not len(costs):
        return bins
    # An entry: (-difference, creation number, bins as (load, items) by falling load).
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = [
        (-cost, item, [(cost, [item])] + [(0.0, []) for _ in range(num_bins - 1)])
        for item, cost in enumerate(costs.tolist())
    ]
    heapq.heapify(heap)
    created = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], created, joined))
        created += 1
    for number, (_, items) in enumerate(heap[0][2]):
        bins[items] = number
    return bins


def refine(costs: FloatArray, bins: IntArray, num_bins: int, *, max_steps: int = 32) -> IntArray:
    """Move or swap items between the heaviest and the lightest bin while that lowers the larger of the two.

    Never raises the makespan. Each step takes the best single move or swap, O(n + heavy x light).

    Returns:
        int64 [n], a new array.
    """
    bins = bins.copy()
    loads = bin_loads(costs, bins, num_bins)
    for _ in range(max_steps):
        heavy, light = int(loads.argmax()), int(loads.argmin())
        gap = float(loads[heavy] - loads[light])
        given = np.flatnonzero(bins == heavy)
        taken = np.flatnonzero(bins == light)
        # Column 0 is a move (nothing comes back), the others are swaps.
        back = np.concatenate(([0.0], costs[taken]))
        shift = costs[given][:, None] - back[None, :]
        useful = (shift > 0) & (shift < gap)
        if not useful.any():
            break
        distance = np.where(useful, np.abs(shift - gap / 2), np.inf)
        row, column = divmod(int(distance.argmin()), distance.shape[1])
        bins[given[row]] = light
        if column:
            bins[taken[column - 1]] = heavy
        loads[heavy] -= shift[row, column]
        loads[light] += shift[row, column]
    return bins


def balance(costs: FloatArray, num_bins: int) -> IntArray:
    """Return the best of refined LPT and, for small cases where that is not optimal, refined differencing.

    Keeps the bound of LPT, (4/3 - 1/(3 num_bins)) times the optimum.
    """
    bins = refine(costs, lpt(costs, num_bins), num_bins)
    reached = makespan(costs, bins, num_bins)
    if reached > lower_bound(costs, num_bins) and len(costs) * num_bins <= MAX_DIFFERENCING_CELLS:
        other = refine(costs, karmarkar_karp(costs, num_bins), num_bins)
        if makespan(costs, other, num_bins) < reached:
            return other
    return bins


def _longest_first(costs: FloatArray) -> list[int]:
    order: list[int] = np.argsort(-costs, kind="stable").tolist()
    return order


def _check(costs: FloatArray, num_bins: int) -> None:
    if num_bins < 1:
        raise ValueError(f"num_bins is {num_bins}, must be at least 1")
    if len(costs) and not (np.isfinite(costs).all() and costs.min() >= 0):
        raise ValueError(f"costs must be finite and not negative, got {costs.min()} .. {costs.max()}")

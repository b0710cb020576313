"""Ways to partition that ``benchmarks.partition`` measures against the planner's own, and exact optima.

Equal-count LPT, and differencing (Karmarkar and Karp 1982): no better worst case than LPT, far smaller
differences when there are many items. The exact optima are for small cases.
"""

from __future__ import annotations

import heapq

import numpy as np

from balancer.partition import FloatArray, IntArray, balance, lower_bound, makespan


def lpt_equal_count(costs: FloatArray, num_bins: int) -> IntArray:
    """Assign longest first with item counts that differ by at most one between bins.

    A heuristic: the bound of LPT does not hold, because a light bin may be full. No bin is heavier than
    ceil(n / num_bins) times the largest item.

    Returns:
        int64 [n], the bin of each item.
    """
    smallest, num_larger = divmod(len(costs), num_bins)
    heap = [(0.0, number) for number in range(num_bins)]
    counts = [0] * num_bins
    bins = np.zeros(len(costs), dtype=np.int64)
    values = costs.tolist()
    for item in np.argsort(-costs, kind="stable").tolist():
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


def optimal_makespan(costs: FloatArray, num_bins: int, *, gap: float = 0.0) -> float:
    """Return the least makespan by depth-first branch and bound, longest item first.

    Exponential: for some dozen items. A branch ends when a bin would reach the best makespan so far; of bins
    with equal loads only the first is tried. Ends early within ``gap`` (relative) of the lower bound.
    """
    values = sorted(costs.tolist(), reverse=True)
    bound = lower_bound(costs, num_bins) * (1 + gap)
    best = makespan(costs, balance(costs, num_bins), num_bins)
    loads = [0.0] * num_bins

    def search(item: int) -> None:
        nonlocal best
        if item == len(values):
            best = max(loads)
            return
        for load in sorted(set(loads)):
            if load + values[item] >= best or best <= bound:
                return
            number = loads.index(load)
            loads[number] = load + values[item]
            search(item + 1)
            loads[number] = load

    search(0)
    return best

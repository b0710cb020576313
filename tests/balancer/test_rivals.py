"""The rivals of the planner's partition keep their own bounds, and the exact optima are optima."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from balancer.partition import FloatArray, balance, bin_loads, lower_bound, lpt, makespan
from benchmarks.rivals import karmarkar_karp, lpt_equal_count, optimal_makespan

COSTS = st.lists(st.integers(0, 50), max_size=7).map(lambda values: np.asarray(values, dtype=np.float64))
MANY_COSTS = st.lists(st.integers(0, 1000), max_size=60).map(
    lambda values: np.asarray(values, dtype=np.float64)
)
BINS = st.integers(1, 3)
MANY_BINS = st.integers(1, 9)


@settings(max_examples=60)
@given(COSTS, BINS)
def test_branch_and_bound_finds_the_least_of_all_assignments(costs: FloatArray, num_bins: int) -> None:
    choices = itertools.product(range(num_bins), repeat=len(costs))
    least = min(makespan(costs, np.asarray(bins, dtype=np.int64), num_bins) for bins in choices)
    assert optimal_makespan(costs, num_bins) == least
    assert lower_bound(costs, num_bins) <= least + 1e-9


def test_branch_and_bound_finds_what_the_planner_misses() -> None:
    costs = np.asarray([27.0, 15.0, 15.0, 15.0, 10.0, 6.0])
    assert makespan(costs, balance(costs, 2), 2) == 46
    assert optimal_makespan(costs, 2) == 45


@settings(max_examples=60)
@given(COSTS, BINS)
def test_differencing_stays_within_its_bound(costs: FloatArray, num_bins: int) -> None:
    # 7/6 for two bins (Fischetti and Martello); 4/3 - 1/(3(m-1)) for more (Michiels et al. 2003).
    bound = 1.0 if num_bins == 1 else 7 / 6 if num_bins == 2 else 4 / 3 - 1 / (3 * (num_bins - 1))
    assert (
        makespan(costs, karmarkar_karp(costs, num_bins), num_bins)
        <= bound * optimal_makespan(costs, num_bins) + 1e-9
    )


def test_differencing_finds_the_split_that_lpt_misses() -> None:
    costs = np.asarray([8.0, 7.0, 6.0, 5.0, 4.0])
    assert makespan(costs, lpt(costs, 2), 2) == 17
    assert makespan(costs, karmarkar_karp(costs, 2), 2) == 16


@settings(max_examples=80)
@given(MANY_COSTS, MANY_BINS)
def test_equal_count_gives_counts_that_differ_by_at_most_one(costs: FloatArray, num_bins: int) -> None:
    counts = np.bincount(lpt_equal_count(costs, num_bins), minlength=num_bins)
    assert counts.sum() == len(costs)
    assert counts.max() - counts.min() <= 1


def test_equal_count_evens_loads_as_far_as_the_counts_allow() -> None:
    costs = np.asarray([9.0, 8.0, 2.0, 1.0])
    assert bin_loads(costs, lpt_equal_count(costs, 2), 2).tolist() == [10, 10]

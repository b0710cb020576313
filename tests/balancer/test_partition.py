"""Bounds and orders of the partition functions, against brute force on small cases."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from balancer.partition import (
    FloatArray,
    balance,
    bin_loads,
    karmarkar_karp,
    lower_bound,
    lpt,
    lpt_equal_count,
    makespan,
    refine,
)

COSTS = st.lists(st.integers(0, 50), max_size=7).map(lambda values: np.asarray(values, dtype=np.float64))
MANY_COSTS = st.lists(st.integers(0, 1000), max_size=60).map(
    lambda values: np.asarray(values, dtype=np.float64)
)
BINS = st.integers(1, 3)
MANY_BINS = st.integers(1, 9)


def optimum(costs: FloatArray, num_bins: int) -> float:
    """The least makespan of all assignments."""
    choices = itertools.product(range(num_bins), repeat=len(costs))
    return min(makespan(costs, np.asarray(bins, dtype=np.int64), num_bins) for bins in choices)


@settings(max_examples=60)
@given(COSTS, BINS)
def test_lpt_stays_within_the_bound_of_graham(costs: FloatArray, num_bins: int) -> None:
    bound = 4 / 3 - 1 / (3 * num_bins)
    assert makespan(costs, lpt(costs, num_bins), num_bins) <= bound * optimum(costs, num_bins) + 1e-9


@settings(max_examples=60)
@given(COSTS, BINS)
def test_differencing_stays_within_its_bound(costs: FloatArray, num_bins: int) -> None:
    # 7/6 for two bins (Fischetti and Martello); 4/3 - 1/(3(m-1)) for more (Michiels et al. 2003).
    bound = 1.0 if num_bins == 1 else 7 / 6 if num_bins == 2 else 4 / 3 - 1 / (3 * (num_bins - 1))
    assert (
        makespan(costs, karmarkar_karp(costs, num_bins), num_bins) <= bound * optimum(costs, num_bins) + 1e-9
    )


def test_differencing_finds_the_split_that_lpt_misses() -> None:
    costs = np.asarray([8.0, 7.0, 6.0, 5.0, 4.0])
    assert makespan(costs, lpt(costs, 2), 2) == 17
    assert makespan(costs, karmarkar_karp(costs, 2), 2) == 16


def test_refinement_reaches_the_optimum_of_a_case_that_lpt_misses() -> None:
    costs = np.asarray([3.0, 3.0, 2.0, 2.0, 2.0])
    bins = lpt(costs, 2)
    assert makespan(costs, bins, 2) == 7
    assert makespan(costs, refine(costs, bins, 2), 2) == 6


@settings(max_examples=80)
@given(MANY_COSTS, MANY_BINS, st.integers(0, 2**32 - 1))
def test_refinement_never_raises_the_makespan(costs: FloatArray, num_bins: int, seed: int) -> None:
    bins = np.random.default_rng(seed).integers(0, num_bins, len(costs))
    refined = refine(costs, bins, num_bins)
    assert makespan(costs, refined, num_bins) <= makespan(costs, bins, num_bins)


@settings(max_examples=80)
@given(MANY_COSTS, MANY_BINS)
def test_balance_lies_between_the_lower_bound_and_lpt(costs: FloatArray, num_bins: int) -> None:
    reached = makespan(costs, balance(costs, num_bins), num_bins)
    assert lower_bound(costs, num_bins) <= reached + 1e-6
    assert reached <= makespan(costs, lpt(costs, num_bins), num_bins)


@settings(max_examples=80)
@given(MANY_COSTS, MANY_BINS)
def test_equal_count_gives_counts_that_differ_by_at_most_one(costs: FloatArray, num_bins: int) -> None:
    counts = np.bincount(lpt_equal_count(costs, num_bins), minlength=num_bins)
    assert counts.sum() == len(costs)
    assert counts.max() - counts.min() <= 1


def test_equal_count_evens_loads_as_far_as_the_counts_allow() -> None:
    costs = np.asarray([9.0, 8.0, 2.0, 1.0])
    assert bin_loads(costs, lpt_equal_count(costs, 2), 2).tolist() == [10, 10]


@settings(max_examples=60)
@given(MANY_COSTS, MANY_BINS)
def test_every_item_gets_a_bin_that_exists(costs: FloatArray, num_bins: int) -> None:
    for function in (lpt, lpt_equal_count, karmarkar_karp, balance):
        bins = function(costs, num_bins)
        assert bins.dtype == np.int64
        assert len(bins) == len(costs)
        assert np.logical_and(bins >= 0, bins < num_bins).all()
        assert bin_loads(costs, bins, num_bins).sum() == costs.sum()


def test_ties_go_by_index_and_bin_number() -> None:
    assert lpt(np.ones(5), 3).tolist() == [0, 1, 2, 0, 1]
    assert lpt_equal_count(np.ones(5), 3).tolist() == [0, 1, 2, 0, 1]


def test_lpt_counts_what_the_bins_hold_already() -> None:
    assert lpt(np.asarray([1.0, 1.0]), 2, loads=np.asarray([5.0, 0.0])).tolist() == [1, 1]


def test_differencing_is_left_out_where_it_would_be_slow() -> None:
    costs = np.arange(1.0, 4001.0)
    bins = balance(costs, 100)
    assert makespan(costs, bins, 100) <= 1.01 * lower_bound(costs, 100)


@pytest.mark.parametrize("bad", [[-1.0], [float("nan")], [float("inf")]])
def test_costs_that_are_no_costs_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="costs must be finite and not negative"):
        lpt(np.asarray(bad), 2)


def test_no_bins_are_refused() -> None:
    with pytest.raises(ValueError, match="num_bins is 0, must be at least 1"):
        lpt(np.ones(2), 0)

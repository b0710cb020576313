"""Bounds and orders of the partition functions, against brute force on small cases."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from balancer.partition import (
    FloatArray,
    balance,
    bin_loads,
    lower_bound,
    lpt,
    makespan,
    multifit,
    refine,
)
from benchmarks.rivals import optimal_makespan

COSTS = st.lists(st.integers(0, 50), max_size=7).map(lambda values: np.asarray(values, dtype=np.float64))
MANY_COSTS = st.lists(st.integers(0, 1000), max_size=60).map(
    lambda values: np.asarray(values, dtype=np.float64)
)
BINS = st.integers(1, 3)
MANY_BINS = st.integers(1, 9)


@settings(max_examples=60)
@given(COSTS, BINS)
def test_lpt_stays_within_the_bound_of_graham(costs: FloatArray, num_bins: int) -> None:
    bound = 4 / 3 - 1 / (3 * num_bins)
    assert makespan(costs, lpt(costs, num_bins), num_bins) <= bound * optimal_makespan(costs, num_bins) + 1e-9


def test_refinement_reaches_the_optimum_of_a_case_that_lpt_misses() -> None:
    costs = np.asarray([3.0, 3.0, 2.0, 2.0, 2.0])
    bins = lpt(costs, 2)
    assert makespan(costs, bins, 2) == 7
    assert makespan(costs, refine(costs, bins, 2), 2) == 6


def test_refinement_swaps_with_a_third_bin_where_the_lightest_does_not_help() -> None:
    costs = np.asarray([8.0, 5.0, 8.0, 7.0, 2.0])
    bins = np.asarray([1, 1, 0, 2, 2])
    assert bin_loads(costs, bins, 3).tolist() == [8, 13, 9]
    assert bin_loads(costs, refine(costs, bins, 3), 3).tolist() == [8, 12, 10]


def test_refinement_counts_what_the_bins_hold_besides() -> None:
    costs, bins = np.asarray([10.0, 10.0]), np.zeros(2, dtype=np.int64)
    assert refine(costs, bins, 2, fixed=np.asarray([0.0, 11.0])).tolist() == [0, 0]
    assert sorted(refine(costs, bins, 2, fixed=np.asarray([1.0, 1.0])).tolist()) == [0, 1]


def test_refinement_takes_a_step_for_each_of_many_bins() -> None:
    costs, bins = np.ones(64), np.zeros(64, dtype=np.int64)
    assert makespan(costs, refine(costs, bins, 64), 64) == 1


def test_multifit_finds_the_optimum_that_refined_lpt_misses() -> None:
    costs = np.asarray([11.0, 7.0, 7.0, 5.0, 5.0, 3.0, 2.0])
    bins = refine(costs, lpt(costs, 2), 2)
    assert makespan(costs, bins, 2) == 21
    assert makespan(costs, multifit(costs, bins, 2), 2) == 20
    assert makespan(costs, balance(costs, 2), 2) == optimal_makespan(costs, 2) == 20


@settings(max_examples=80)
@given(MANY_COSTS, MANY_BINS, st.integers(0, 2**32 - 1))
def test_multifit_never_raises_the_makespan(costs: FloatArray, num_bins: int, seed: int) -> None:
    bins = np.random.default_rng(seed).integers(0, num_bins, len(costs))
    found = multifit(costs, bins, num_bins)
    assert makespan(costs, found, num_bins) <= makespan(costs, bins, num_bins)
    assert bin_loads(costs, found, num_bins).sum() == costs.sum()


def test_lower_bound_counts_the_items_that_must_share_a_bin() -> None:
    assert lower_bound(np.asarray([3.0, 3.0, 3.0, 1.0]), 3) == 4
    assert lower_bound(np.asarray([3.0, 3.0, 3.0]), 2) == 6
    assert lower_bound(np.full(9, 2.0), 4) == 6
    assert lower_bound(np.zeros(0), 4) == 0


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


@settings(max_examples=60)
@given(MANY_COSTS, MANY_BINS)
def test_every_item_gets_a_bin_that_exists(costs: FloatArray, num_bins: int) -> None:
    for function in (lpt, balance):
        bins = function(costs, num_bins)
        assert bins.dtype == np.int64
        assert len(bins) == len(costs)
        assert np.logical_and(bins >= 0, bins < num_bins).all()
        assert bin_loads(costs, bins, num_bins).sum() == costs.sum()


def test_ties_go_by_index_and_bin_number() -> None:
    assert lpt(np.ones(5), 3).tolist() == [0, 1, 2, 0, 1]


def test_lpt_counts_what_the_bins_hold_already() -> None:
    assert lpt(np.asarray([1.0, 1.0]), 2, loads=np.asarray([5.0, 0.0])).tolist() == [1, 1]


@pytest.mark.parametrize("bad", [[-1.0], [float("nan")], [float("inf")]])
def test_costs_that_are_no_costs_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="costs must be finite and not negative"):
        lpt(np.asarray(bad), 2)


def test_no_bins_are_refused() -> None:
    with pytest.raises(ValueError, match="num_bins is 0, must be at least 1"):
        lpt(np.ones(2), 0)

"""Packs to their places, against brute force on small cases."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from balancer.partition import FloatArray
from balancer.reorder import lanes_of_group, num_microbatches, packs_by_cost, packs_in_order, step_makespan
from omni_pipeline.core.topology import Topology
from tests.support.strategies import worlds

COSTS = st.lists(st.integers(0, 100), max_size=24).map(lambda values: np.asarray(values, dtype=np.float64))


@given(worlds(max_replicas=8), st.integers(1, 20), st.integers(1, 4))
def test_lanes_divide_over_groups_and_fit_their_microbatches(
    topology: Topology, num_lanes: int, packs_per_lane: int
) -> None:
    found = [lanes_of_group(group, num_lanes, topology) for group in range(topology.num_groups)]
    assert sorted(itertools.chain(*found)) == list(range(num_lanes))
    replicas = topology.num_replicas // topology.num_groups
    most = max(len(lanes) for lanes in found) * packs_per_lane
    microbatches = num_microbatches(num_lanes, packs_per_lane, topology)
    assert (microbatches - 1) * replicas < most <= microbatches * replicas


def test_lanes_of_a_group_are_those_equal_modulo_the_groups() -> None:
    topology = Topology(world_size=8, replicas_per_group=2)
    assert lanes_of_group(1, 10, topology) == (1, 5, 9)
    assert num_microbatches(10, 2, topology) == 3


def test_packs_in_order_fill_one_microbatch_after_the_other() -> None:
    placed = packs_in_order(5, 2)
    assert placed.replicas.tolist() == [0, 1, 0, 1, 0]
    assert placed.microbatches.tolist() == [0, 0, 1, 1, 2]


@settings(max_examples=80)
@given(COSTS, st.integers(1, 5))
def test_packs_by_cost_is_never_worse_than_in_order_and_keeps_one_pack_per_place(
    costs: FloatArray, num_replicas: int
) -> None:
    placed = packs_by_cost(costs, costs, num_replicas)
    places = set(zip(placed.replicas.tolist(), placed.microbatches.tolist(), strict=True))
    assert len(places) == len(costs)
    assert placed.replicas.max(initial=0) < num_replicas
    assert placed.microbatches.max(initial=0) <= max(0, len(costs) - 1) // num_replicas
    before = step_makespan(costs, packs_in_order(len(costs), num_replicas).microbatches)
    assert step_makespan(costs, placed.microbatches) <= before


@settings(max_examples=40)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_packs_by_cost_is_the_optimum_of_all_groupings(values: list[int]) -> None:
    costs, num_replicas = np.asarray(values, dtype=np.float64), 2
    num_places = -(-len(values) // num_replicas) * num_replicas
    best = min(
        step_makespan(costs, np.asarray(places, dtype=np.int64) // num_replicas)
        for places in itertools.permutations(range(num_places), len(values))
    )
    assert step_makespan(costs, packs_by_cost(costs, costs, num_replicas).microbatches) == best


def test_totals_of_the_replicas_are_evened() -> None:
    costs = np.asarray([10.0, 8.0, 5.0, 3.0])
    placed = packs_by_cost(costs, costs, 2)
    assert np.bincount(placed.replicas, weights=costs).tolist() == [13, 13]

"""Packs and media to their places, against brute force on small cases."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from balancer.partition import FloatArray, lpt, makespan
from balancer.reorder import (
    MediaLoad,
    exchange_time,
    lanes_of_group,
    main_owners,
    num_microbatches,
    packs_by_cost,
    packs_in_order,
    place_media,
    step_makespan,
)
from omni_pipeline.core.topology import Topology
from tests.support.strategies import worlds

COSTS = st.lists(st.integers(0, 100), max_size=24).map(lambda values: np.asarray(values, dtype=np.float64))


def free(num_rows: int, num_messages: int) -> float:
    """A network that takes no time."""
    return 0.0


@st.composite
def loads(draw: st.DrawFn) -> MediaLoad:
    """Segments whose home is some member and whose rows one or two members own."""
    num_members = draw(st.integers(1, 6))
    members = st.integers(0, num_members - 1)
    costs = draw(COSTS)
    home = [draw(members) for _ in costs]
    pieces = [
        (item, owner, draw(st.integers(1, 9)))
        for item in range(len(costs))
        for owner in draw(st.sets(members, min_size=1, max_size=2))
    ]
    table = np.asarray(pieces, dtype=np.int64).reshape(-1, 3)
    return MediaLoad(
        costs=costs,
        home=np.asarray(home, dtype=np.int64),
        piece_item=table[:, 0],
        piece_owner=table[:, 1],
        piece_rows=table[:, 2],
        num_members=num_members,
    )


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


@settings(max_examples=80)
@given(loads(), st.floats(0, 10), st.floats(0, 10))
def test_media_never_run_longer_than_at_home_nor_the_exchange_costs_more_than_it_gains(
    load: MediaLoad, per_row: float, per_message: float
) -> None:
    def transfer(num_rows: int, num_messages: int) -> float:
        return num_rows * per_row + num_messages * per_message

    members = place_media(load, transfer)
    before = makespan(load.costs, load.home, load.num_members)
    after = makespan(load.costs, members, load.num_members)
    assert after <= before
    gain = before - after
    cost = exchange_time(load, members, transfer) - exchange_time(load, load.home, transfer)
    assert gain >= cost - 1e-9


@settings(max_examples=80)
@given(loads())
def test_with_a_free_network_media_are_within_lpt(load: MediaLoad) -> None:
    reached = makespan(load.costs, place_media(load, free), load.num_members)
    assert reached <= makespan(load.costs, lpt(load.costs, load.num_members), load.num_members)


def two_images_on_one_of_two_ranks() -> MediaLoad:
    return MediaLoad(
        costs=np.asarray([4.0, 4.0]),
        home=np.zeros(2, dtype=np.int64),
        piece_item=np.asarray([0, 1]),
        piece_owner=np.zeros(2, dtype=np.int64),
        piece_rows=np.asarray([10, 10]),
        num_members=2,
    )


@pytest.mark.parametrize(("per_row", "num_moved"), [(0.1, 1), (0.39, 1), (0.41, 0), (10.0, 0)])
def test_a_move_must_pay(per_row: float, num_moved: int) -> None:
    # One image moved gains 4 and sends 10 rows.
    load = two_images_on_one_of_two_ranks()
    members = place_media(load, lambda rows, messages: rows * per_row)
    assert int((members != load.home).sum()) == num_moved


def test_of_equal_makespans_the_one_that_moves_fewer_rows_wins() -> None:
    # Four equal images at home on rank 0; rank 1 owns the rows of the first two.
    load = MediaLoad(
        costs=np.full(4, 5.0),
        home=np.zeros(4, dtype=np.int64),
        piece_item=np.arange(4),
        piece_owner=np.asarray([1, 1, 0, 0]),
        piece_rows=np.full(4, 10),
        num_members=2,
    )
    members = place_media(load, lambda rows, messages: float(rows) / 100)
    assert makespan(load.costs, members, 2) == 10
    assert members.tolist() == main_owners(load).tolist() == [1, 1, 0, 0]


def test_exchange_counts_rows_and_messages_of_the_busiest_rank() -> None:
    load = MediaLoad(
        costs=np.ones(3),
        home=np.zeros(3, dtype=np.int64),
        piece_item=np.asarray([0, 1, 2, 2]),
        piece_owner=np.asarray([1, 1, 0, 2]),
        piece_rows=np.asarray([3, 4, 5, 6]),
        num_members=3,
    )
    seen = []

    def transfer(num_rows: int, num_messages: int) -> float:
        seen.append((num_rows, num_messages))
        return 1.0

    assert exchange_time(load, load.home, transfer) == 1.0
    # Rank 0 sends 3 + 4 to rank 1 and 6 to rank 2; its own 5 rows do not travel.
    assert seen == [(13, 2)]

"""Media to members: never longer than at home, never longer for being shared, within the bound of LPT."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from balancer.encoding import (
    Encoding,
    MediaLoad,
    exchange_time,
    fits,
    main_owners,
    makespan,
    member_bytes,
    whole,
)
from balancer.lssp import forced_degrees
from balancer.media import place_media
from balancer.partition import lpt
from tests.balancer.loads import free, media_load, media_loads, network

NETWORKS = st.tuples(st.sampled_from([0.0, 0.1, 1.0, 10.0]), st.sampled_from([0.0, 2.0, 10.0]))


def placed(
    load: MediaLoad, per_row: float = 0.0, per_message: float = 0.0, *, search: bool = True
) -> Encoding:
    """Return the placement over a network of these prices; there must be one."""
    encoding = place_media(load, network(per_row, per_message), search=search)
    assert encoding is not None
    return encoding


@settings(max_examples=150)
@given(media_loads(), NETWORKS)
def test_media_never_run_longer_than_at_home_nor_the_exchange_costs_more_than_it_gains(
    load: MediaLoad, prices: tuple[float, float]
) -> None:
    price = network(*prices)
    encoding, home = placed(load, *prices), whole(load.home)
    gain = makespan(load, home) - makespan(load, encoding)
    assert gain >= 0
    assert gain >= exchange_time(load, encoding, price) - exchange_time(load, home, price) - 1e-9


@settings(max_examples=150)
@given(media_loads(), NETWORKS)
def test_sharing_is_never_longer_than_not_sharing(load: MediaLoad, prices: tuple[float, float]) -> None:
    def time(encoding: Encoding) -> float:
        return makespan(load, encoding) + exchange_time(load, encoding, network(*prices))

    alone = placed(load, *prices, search=False)
    assert not alone.long_items
    assert time(placed(load, *prices)) <= time(alone)


@settings(max_examples=150)
@given(media_loads())
def test_with_a_free_network_media_are_within_lpt(load: MediaLoad) -> None:
    reached = makespan(load, placed(load))
    bins = whole(lpt(load.costs, load.num_members))
    assert reached <= makespan(load, bins)
    assert reached >= load.mean


@settings(max_examples=150)
@given(st.lists(st.integers(0, 100), max_size=16), st.sampled_from([2, 4, 8]))
def test_shared_at_no_cost_the_makespan_is_within_the_mean_and_one_whole_segment(
    costs: list[int], num_members: int
) -> None:
    # Shares of 8 at most; ticks are rounded up, one for each share.
    load = media_load([float(cost) for cost in costs], num_members=num_members)
    reached = makespan(load, placed(load))
    near = [cost for cost in costs if cost <= load.mean]
    shares = [np.ceil(cost / num_members) for cost in costs if cost > load.mean]
    assert reached <= 1.01 * load.mean + max([*near, *shares, 0]) + len(costs)


def test_less_exchange_never_buys_a_longer_makespan() -> None:
    # The first and the last one's rows are with the other member: changing places would save 10 rows and
    # lengthen 19 to 24.
    pieces = [(0, 0, 1), (1, 1, 2), (2, 1, 9)]
    load = media_load([5.0, 10.0, 19.0], num_members=2, rows=[1, 2, 9], home=[1, 1, 0], pieces=pieces)
    assert makespan(load, placed(load, 1.0)) == 19


@pytest.mark.parametrize(
    ("costs", "rows", "max_rows"),
    [([17.0, 11.0, 8.0, 5.0], [6, 8, 5, 9], 11), ([20.0, 11.0, 19.0], [6, 4, 7], 9)],
)
def test_where_even_times_break_the_cap_even_bytes_keep_it(
    costs: list[float], rows: list[int], max_rows: int
) -> None:
    num_members = len(costs) - 1
    load = media_load(costs, num_members=num_members, rows=rows, max_bytes=10.0 * max_rows)
    encoding = place_media(load, free, search=len(costs) == 3)
    assert encoding is not None
    assert fits(load, encoding)


def test_a_swap_that_breaks_the_cap_is_not_made() -> None:
    load = media_load([6.0, 4.0, 9.0], num_members=2, rows=[6, 6, 3], home=[1, 1, 0], max_degree=1)
    assert makespan(load, placed(load)) == 10
    assert makespan(load, placed(dataclasses.replace(load, max_bytes=110.0))) == 13


def two_images_on_one_of_two_ranks() -> MediaLoad:
    return media_load([4.0, 4.0], num_members=2, rows=[10, 10], max_degree=1)


@pytest.mark.parametrize(("per_row", "num_moved"), [(0.1, 1), (0.39, 1), (0.41, 0), (10.0, 0)])
def test_a_move_must_pay(per_row: float, num_moved: int) -> None:
    # One image moved gains 4 and sends 10 rows.
    load = two_images_on_one_of_two_ranks()
    assert int((placed(load, per_row).members != load.home).sum()) == num_moved


@pytest.mark.parametrize(("per_row", "is_long"), [(0.1, True), (0.59, True), (0.61, False), (10.0, False)])
def test_sharing_must_pay(per_row: float, is_long: bool) -> None:
    # A clip of 12 shared by two gains 6 and sends half of its 20 rows.
    load = media_load([12.0], num_members=2, rows=[20])
    assert placed(load, per_row).degrees.tolist() == [2 if is_long else 1]


def test_of_equal_makespans_the_one_that_moves_fewer_rows_wins() -> None:
    # Four equal images at home on rank 0; rank 1 owns the rows of the first two.
    pieces = [(0, 1, 10), (1, 1, 10), (2, 0, 10), (3, 0, 10)]
    load = media_load([5.0] * 4, num_members=2, rows=[10] * 4, pieces=pieces)
    encoding = placed(load, 0.01)
    assert makespan(load, encoding) == 10
    assert encoding.members.tolist() == main_owners(load).tolist() == [1, 1, 0, 0]
    assert not encoding.long_items


def test_a_clip_longer_than_all_else_is_shared_by_all() -> None:
    load = media_load([80.0, 6.0, 6.0, 6.0, 6.0], num_members=8, home=[3, 0, 1, 2, 3])
    encoding = placed(load, 0.01)
    assert encoding.degrees.tolist() == [8, 1, 1, 1, 1]
    assert encoding.members[0] == 0
    assert makespan(load, encoding) == 16


def test_two_long_clips_take_the_half_that_owns_their_rows() -> None:
    load = media_load([40.0, 40.0], num_members=8, home=[6, 1])
    encoding = placed(load, 0.1)
    assert encoding.degrees.tolist() == [4, 4]
    assert encoding.members.tolist() == [4, 0]


def test_no_more_ranks_share_a_clip_than_help() -> None:
    # With 3 ticks of each share for exchange, halves (9) are as short as the load of the others allows.
    load = media_load([12.0, 9.0, 9.0], num_members=4, overhead=3.0)
    assert placed(load).degrees.tolist() == [2, 1, 1]


def test_of_segments_of_equal_length_only_as_many_are_shared_as_help() -> None:
    load = media_load([9.0, 9.0, 9.0], num_members=2, overhead=1.0)
    encoding = placed(load)
    assert encoding.degrees.tolist() == [2, 1, 1]
    assert makespan(load, encoding) == 15


@settings(max_examples=150)
@given(media_loads(), st.integers(1, 30), st.booleans())
def test_no_member_keeps_more_bytes_than_the_cap(load: MediaLoad, rows: int, search: bool) -> None:
    load = dataclasses.replace(load, max_bytes=10.0 * rows)
    forced, overflows = forced_degrees(
        [round(value / 10) for value in load.num_bytes],
        load.num_bytes,
        shares=load.shares,
        degrees=sorted(load.subgroups),
        min_rows=0,
        max_bytes=load.max_bytes,
    )
    if overflows:
        return
    encoding = place_media(load, free, forced=forced, search=search)
    if encoding is not None:
        assert fits(load, encoding)
        assert (encoding.degrees >= forced).all()
    elif search:
        # First fit on bytes always succeeds with a third of the room left over.
        assert load.num_bytes.sum() > load.num_members * load.max_bytes / 3


def test_a_cap_shares_what_time_alone_would_keep_whole() -> None:
    load = media_load([8.0, 8.0], num_members=4, home=[0, 1], overhead=5.0, max_bytes=50)
    assert placed(dataclasses.replace(load, max_bytes=np.inf)).degrees.tolist() == [1, 1]
    encoding = place_media(load, free, forced=np.asarray([2, 2]))
    assert encoding is not None
    assert encoding.degrees.tolist() == [2, 2]
    assert member_bytes(load, encoding).tolist() == [40] * 4

"""Loads, bytes and travelling rows of whole and of shared segments."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from balancer.encoding import (
    Encoding,
    MediaLoad,
    exchange_time,
    fits,
    main_owners,
    member_bytes,
    member_loads,
    subgroups,
    travel,
    whole,
)
from tests.balancer.loads import busiest, media_load, media_loads, network


def test_subgroups_are_aligned_runs_inside_a_node() -> None:
    ranks = [0, 1, 2, 3, 4, 5, 6, 7]
    assert subgroups(ranks, [ranks], 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert subgroups(ranks, [ranks[:4], ranks[4:]], 8).tolist() == []
    # Nodes of six ranks: the last two of each are in no subgroup of four.
    ranks = list(range(12))
    assert subgroups(ranks, [ranks[:6], ranks[6:]], 4).tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]


def test_members_of_a_subgroup_are_numbered_within_the_group() -> None:
    # Two stages of two replicas: ranks 2, 3 of the first stage and 6, 7 of the second.
    assert subgroups([2, 3, 6, 7], [[2, 3], [6, 7]], 2).tolist() == [[0, 1], [2, 3]]
    assert subgroups([2, 3, 6, 7], [[2, 3, 6, 7]], 4).tolist() == [[0, 1, 2, 3]]
    assert subgroups([3, 4, 5], [[3], [4, 5]], 2).tolist() == [[1, 2]]


@st.composite
def encoded(draw: st.DrawFn) -> tuple[MediaLoad, Encoding]:
    """Any load with any encoding of it."""
    load = draw(media_loads())
    members, degrees = [], []
    for item in range(len(load.costs)):
        choices = [(member, 1) for member in range(load.num_members)]
        for degree, groups in load.subgroups.items():
            if load.shares(item, degree) is not None:
                choices += [(int(group[0]), degree) for group in groups]
        member, degree = draw(st.sampled_from(choices))
        members.append(member)
        degrees.append(degree)
    return load, Encoding(np.asarray(members, dtype=np.int64), np.asarray(degrees, dtype=np.int64))


@settings(max_examples=80)
@given(encoded())
def test_rows_travel_once_from_their_share_to_their_owner(case: tuple[MediaLoad, Encoding]) -> None:
    load, encoding = case
    makers: list[tuple[int, int]] = []
    for item in range(len(load.costs)):
        owners = np.repeat(load.piece_owner, load.piece_rows)[
            np.repeat(load.piece_item, load.piece_rows) == item
        ]
        first, degree = int(encoding.members[item]), int(encoding.degrees[item])
        shares = load.shares(item, degree) if degree > 1 else None
        runs = shares.rows if shares else [len(owners)]
        senders = np.repeat(np.arange(first, first + degree), runs)
        makers += zip(senders.tolist(), owners.tolist(), strict=True)
    sender, owner, rows = travel(load, encoding)
    assert (rows > 0).all()
    found = zip(np.repeat(sender, rows).tolist(), np.repeat(owner, rows).tolist(), strict=True)
    assert sorted(found) == sorted(makers)


@settings(max_examples=40)
@given(encoded())
def test_bytes_of_shares_sum_to_those_of_whole_segments(case: tuple[MediaLoad, Encoding]) -> None:
    load, encoding = case
    assert member_bytes(load, encoding).sum() == load.num_bytes.sum()
    assert member_loads(load, encoding).sum() >= load.costs.sum()


def test_a_share_adds_to_its_own_member_only() -> None:
    load = media_load([12.0, 5.0], num_members=4, rows=[6, 2], overhead=1.0, max_bytes=40)
    encoding = Encoding(np.asarray([2, 0]), np.asarray([2, 1]))
    assert member_loads(load, encoding).tolist() == [5, 0, 7, 7]
    assert member_bytes(load, encoding).tolist() == [20, 0, 30, 30]
    assert fits(load, encoding)
    assert not fits(load, whole(np.asarray([2, 2])))
    assert fits(media_load([12.0, 5.0], num_members=4, rows=[6, 2]), whole(np.asarray([2, 2])))


def test_rows_travel_from_the_share_that_makes_them() -> None:
    pieces = [(0, 1, 3), (1, 1, 4), (2, 0, 5), (2, 2, 6)]
    load = media_load([1.0, 1.0, 1.0], num_members=3, rows=[3, 4, 11], pieces=pieces)
    # Rank 0 sends 3 + 4 to rank 1 and 6 to rank 2; its own 5 rows do not travel.
    assert busiest(*travel(load, whole(load.home))) == (13, 2)
    # Ranks 0 and 1 share the last one, 6 and 5 rows: rank 0 has 1 row of rank 2, rank 1 the other 5.
    shared = Encoding(np.asarray([1, 1, 0]), np.asarray([1, 1, 2]))
    assert busiest(*travel(load, shared)) == (6, 2)
    assert exchange_time(load, shared, network(10.0, 1.0)) == 62.0


def test_main_owners_own_most_rows_and_home_where_there_are_none() -> None:
    pieces = [(0, 1, 3), (0, 2, 4), (1, 2, 5), (1, 0, 5)]
    load = media_load([1.0, 1.0, 1.0], num_members=3, rows=[7, 10, 0], home=[0, 2, 1], pieces=pieces)
    assert main_owners(load).tolist() == [2, 0, 1]

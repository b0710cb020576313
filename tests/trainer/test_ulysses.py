"""Swapping rows for heads: every vector arrives once, where it is used, and comes back."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
from hypothesis import given

from omni_pipeline.core.batch import JoinedSegment
from trainer.model.layout import share_layout, vision_layout
from trainer.parallel.ulysses import Indices, Routes, head_routes

HEADS = 8
PATCHES_PER_ROW = 4


@st.composite
def joined_segments(draw: st.DrawFn, num_members: int) -> list[JoinedSegment]:
    """Segments of one to four members in any order, with any shares."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        degree = draw(st.sampled_from([count for count in (1, 2, 4) if count <= num_members]))
        members = tuple(draw(st.permutations(range(num_members)))[:degree])
        shares = tuple(draw(st.integers(1, 3)) for _ in members)
        found.append(JoinedSegment((1, 2, 2 * sum(shares)), members, shares, place=-1))
    return found


def _exchange(sent: list[npt.NDArray[np.int64]], routes: list[Routes]) -> list[npt.NDArray[np.int64]]:
    """Run an all-to-all of whole vectors among all members."""
    pieces = [
        np.split(vectors[route.pick], np.cumsum(route.send_splits)[:-1])
        for vectors, route in zip(sent, routes, strict=True)
    ]
    received = []
    for member, route in enumerate(routes):
        arrived = [of_sender[member] for of_sender in pieces]
        assert tuple(map(len, arrived)) == route.recv_splits
        received.append(np.concatenate(arrived)[route.place])
    return received


@given(st.integers(1, 5), st.data())
def test_each_member_gets_its_heads_of_every_patch_in_the_order_asked_for(
    num_members: int, data: st.DataObject
) -> None:
    joined = data.draw(joined_segments(num_members))
    counts = [PATCHES_PER_ROW * sum(item.shares) for item in joined]
    orders: list[Indices] = [np.array(data.draw(st.permutations(range(count)))) for count in counts]
    routes = [
        head_routes(
            joined,
            orders,
            member=member,
            num_members=num_members,
            num_heads=HEADS,
            patches_per_row=PATCHES_PER_ROW,
        )
        for member in range(num_members)
    ]
    # A vector is known by (segment, patch, head).
    names = [
        (1000 * index + np.arange(count))[:, None] * HEADS + np.arange(HEADS)
        for index, count in enumerate(counts)
    ]
    own: list[list[Indices]] = [[np.zeros(0, dtype=np.int64)] for _ in range(num_members)]
    used: list[list[tuple[int, Indices]]] = [[] for _ in range(num_members)]
    for item, order, name in zip(joined, orders, names, strict=True):
        bounds = np.cumsum([0, *item.shares]) * PATCHES_PER_ROW
        heads = HEADS // len(item.members)
        for place, member in enumerate(item.members):
            own[member].append(name[bounds[place] : bounds[place + 1]].reshape(-1))
            mine = name[order, place * heads : (place + 1) * heads].reshape(-1)
            used[member].append((len(item.members), mine))
    sent = [np.concatenate(pieces) for pieces in own]
    arrived = _exchange(sent, routes)
    for member, vectors in enumerate(arrived):
        by_degree = sorted(used[member], key=lambda item: item[0])
        np.testing.assert_array_equal(vectors, np.concatenate([[], *(mine for _, mine in by_degree)]))
    returned = _exchange(arrived, [route.reversed() for route in routes])
    for there, back in zip(sent, returned, strict=True):
        np.testing.assert_array_equal(there, back)


def test_rows_leave_in_plan_order_and_patches_know_their_true_place() -> None:
    first = JoinedSegment((1, 4, 4), members=(1, 0), shares=(1, 3), place=1)
    other = JoinedSegment((1, 4, 8), members=(1, 2), shares=(4, 4), place=-1)
    last = JoinedSegment((1, 4, 8), members=(1, 0, 2, 3), shares=(2, 2, 2, 2), place=3)
    grids = [(1, 2, 4), (1, 2, 2)]
    layout = share_layout([first, other, last], member=0, grids=grids, merge=2, window=2)
    # Whole segments make rows 0 to 2, shares rows 3 to 7.
    assert layout.row_order.tolist() == [0, 1, 3, 4, 5, 2, 6, 7]
    assert layout.positions.T.tolist() == [
        *([0, 2], [0, 3], [1, 2], [1, 3]),
        *([2, 0], [2, 1], [3, 0], [3, 1]),
        *([2, 2], [2, 3], [3, 2], [3, 3]),
        *([0, 4], [0, 5], [1, 4], [1, 5]),
        *([0, 6], [0, 7], [1, 6], [1, 7]),
    ]
    assert layout.frame_lengths == {2: (16,), 4: (32,)}
    assert layout.window_lengths == {2: (16,), 4: (16, 16)}
    for item, order in zip((first, other, last), layout.orders, strict=True):
        np.testing.assert_array_equal(order, vision_layout([item.grid], merge=2, window=2).patch_order)


def test_a_member_without_a_share_sends_and_receives_nothing() -> None:
    joined = [JoinedSegment((1, 4, 4), members=(1, 0), shares=(1, 3), place=-1)]
    layout = share_layout(joined, member=2, grids=[(1, 2, 2)], merge=2, window=2)
    assert layout.row_order.tolist() == [0]
    assert layout.positions.shape == (2, 0)
    assert layout.frame_lengths == layout.window_lengths == {1: ()}
    routes = head_routes(
        joined, layout.orders, member=2, num_members=3, num_heads=2, patches_per_row=PATCHES_PER_ROW
    )
    assert (len(routes.pick), routes.send_splits, routes.recv_splits) == (0, (0, 0, 0), (0, 0, 0))

"""Media of one microbatch as plain numbers: what ``balancer.media`` places, without packs or models."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np

from balancer.encoding import ExchangePrice, MediaLoad, Shares, ShareTable, subgroups
from balancer.lssp import DEGREES
from balancer.partition import IntArray

BYTES_PER_ROW = 10


def free(maker: IntArray, owner: IntArray, rows: IntArray) -> float:
    """A network that takes no time."""
    return 0.0


def busiest(maker: IntArray, owner: IntArray, rows: IntArray) -> tuple[int, int]:
    """Return the most rows and the most messages that one member sends or receives."""
    sent: collections.Counter[tuple[str, int]] = collections.Counter()
    links = set()
    for source, target, count in zip(maker.tolist(), owner.tolist(), rows.tolist(), strict=True):
        if source != target:
            sent["sent", source] += count
            sent["received", target] += count
            links.add((source, target))
    ends = (collections.Counter(link[end] for link in links) for end in (0, 1))
    return max(sent.values(), default=0), max(max(end.values(), default=0) for end in ends)


def network(per_row: float, per_message: float) -> ExchangePrice:
    """A network with these prices for the rows and messages of its busiest member."""

    def price(maker: IntArray, owner: IntArray, rows: IntArray) -> float:
        num_rows, num_messages = busiest(maker, owner, rows)
        return num_rows * per_row + num_messages * per_message

    return price


def even_shares(costs: Sequence[float], rows: Sequence[int], *, overhead: float = 0.0) -> ShareTable:
    """Every segment divides evenly into as many shares as it has rows, each with ``overhead`` on top."""

    def shares(item: int, degree: int) -> Shares | None:
        if rows[item] < degree:
            return None
        runs = np.asarray([rows[item] // degree + (n < rows[item] % degree) for n in range(degree)])
        return Shares(
            rows=runs,
            costs=np.full(degree, np.ceil(costs[item] / degree) + overhead),
            num_bytes=BYTES_PER_ROW * runs.astype(np.float64),
            joined=overhead > 0,
        )

    return shares


def media_load(
    costs: Sequence[float],
    *,
    num_members: int,
    rows: Sequence[int] | None = None,
    home: Sequence[int] | None = None,
    pieces: Sequence[tuple[int, int, int]] | None = None,
    overhead: float = 0.0,
    max_degree: int = 8,
    max_bytes: float = np.inf,
) -> MediaLoad:
    """Return a load in one node; rows are at home unless ``pieces``, (item, owner, rows) each, say else."""
    rows = [8] * len(costs) if rows is None else rows
    home = [0] * len(costs) if home is None else home
    pieces = list(zip(range(len(costs)), home, rows, strict=True)) if pieces is None else pieces
    table = np.asarray(pieces, dtype=np.int64).reshape(-1, 3)
    members = range(num_members)
    groups = {degree: subgroups(members, [members], degree) for degree in DEGREES if degree <= max_degree}
    return MediaLoad(
        costs=np.asarray(costs, dtype=np.float64),
        home=np.asarray(home, dtype=np.int64),
        piece_item=table[:, 0],
        piece_owner=table[:, 1],
        piece_rows=table[:, 2],
        num_members=num_members,
        num_bytes=BYTES_PER_ROW * np.asarray(rows, dtype=np.float64),
        max_bytes=max_bytes,
        subgroups={degree: found for degree, found in groups.items() if len(found)},
        shares=even_shares(costs, rows, overhead=overhead),
    )


@st.composite
def media_loads(draw: st.DrawFn, *, max_cost: int = 100, long: bool = True) -> MediaLoad:
    """Segments whose home is some member, whose rows one or two members own, and that may divide."""
    num_members = draw(st.integers(1, 9))
    members = st.integers(0, num_members - 1)
    costs = draw(st.lists(st.integers(0, max_cost), max_size=16))
    pieces = [
        (item, owner, draw(st.integers(1, 9)))
        for item in range(len(costs))
        for owner in sorted(draw(st.sets(members, min_size=1, max_size=2)))
    ]
    rows = [sum(piece[2] for piece in pieces if piece[0] == item) for item in range(len(costs))]
    return media_load(
        costs,
        num_members=num_members,
        rows=rows,
        home=[draw(members) for _ in costs],
        pieces=pieces,
        overhead=draw(st.sampled_from([0.0, 1.0, 9.0])),
        max_degree=draw(st.sampled_from(DEGREES)) if long else 1,
    )

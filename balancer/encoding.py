"""Who encodes the media of one microbatch, and what that costs: loads, bytes, and rows that travel.

A *short* segment is encoded whole by one member. A *long* one is encoded by a sequence-parallel subgroup:
members with consecutive numbers in one node, each with a share of its rows. Everything here is plain numbers;
members are the ranks of the group, numbered from 0, and times are whole ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from balancer.partition import FloatArray, IntArray, bin_loads

# (maker, owner, rows) of every run of rows -> time of their exchange, in the unit of the costs.
ExchangePrice = Callable[[IntArray, IntArray, IntArray], float]


@dataclass(frozen=True, slots=True)
class Shares:
    """How one segment divides over a subgroup, in the order of its members.

    Args:
        rows: int64 [degree]; consecutive runs of its rows.
        costs: float64 [degree]; ticks of each member, exchanges inside the subgroup included.
        num_bytes: float64 [degree]; activations that each member keeps for the backward pass.
        joined: Whether attention crosses the shares.
    """

    rows: IntArray
    costs: FloatArray
    num_bytes: FloatArray
    joined: bool


# (maker, owner, rows) of runs of rows, int64 [runs] each.
Runs = tuple[IntArray, IntArray, IntArray]

# (segment, degree) -> its shares; None where it cannot be divided so.
ShareTable = Callable[[int, int], Shares | None]


def undivided(item: int, degree: int) -> Shares | None:
    """Return None: no segment can be divided."""
    return None


def subgroups(ranks: Sequence[int], nodes: Sequence[Sequence[int]], degree: int) -> IntArray:
    """Return the members of every subgroup of ``degree``, int64 [subgroups, degree], ascending.

    A subgroup is ``degree`` consecutive members of one node; the place of the first among the group's members
    in that node is a multiple of ``degree``. So those of different degrees nest, and a rank is in at most one
    of each.

    Args:
        ranks: Of the group, ascending.
        nodes: The same by node.
        degree: Ranks of a subgroup.
    """
    member_of = {rank: member for member, rank in enumerate(ranks)}
    found = [
        [member_of[rank] for rank in part]
        for node in nodes
        for part in (node[start : start + degree] for start in range(0, len(node), degree))
        if len(part) == degree
    ]
    return np.asarray(found, dtype=np.int64).reshape(-1, degree)


@dataclass(frozen=True)
class MediaLoad:
    """The media segments of one microbatch of a group.

    Args:
        costs: float64 [n]; time to encode each whole.
        home: int64 [n]; the member that encodes it if nothing is balanced.
        piece_item: int64 [p]; a piece is what one member owns of a segment's rows. Which segment; the pieces
            of one segment stand together, in the order of its rows.
        piece_owner: int64 [p]; which member.
        piece_rows: int64 [p]; how many rows.
        num_members: Ranks of the group.
        num_bytes: float64 [n]; activations that encoding it whole keeps for the backward pass.
        max_bytes: Most bytes of a member; infinite without a cap.
        subgroups: By degree, int64 [subgroups, degree]: the members that may share a segment.
        shares: How a segment divides.
    """

    costs: FloatArray
    home: IntArray
    piece_item: IntArray
    piece_owner: IntArray
    piece_rows: IntArray
    num_members: int
    num_bytes: FloatArray = field(default_factory=lambda: np.zeros(0))
    max_bytes: float = np.inf
    subgroups: Mapping[int, IntArray] = field(default_factory=dict)
    shares: ShareTable = undivided

    # A search asks for those of the same segment again and again.
    _runs: dict[tuple[int, int], Runs] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def mean(self) -> float:
        """Load of a member if work were a liquid."""
        return float(self.costs.sum()) / self.num_members

    def runs(self, item: int, degree: int) -> Runs:
        """Return (maker, owner, rows) of a shared segment's runs, makers numbered within the subgroup."""
        found = self._runs.get((item, degree))
        if found is None:
            pieces = slice(*np.searchsorted(self.piece_item, [item, item + 1]).tolist())
            owner_ends = np.cumsum(self.piece_rows[pieces])
            share_ends = np.cumsum(shares_of(self, item, degree).rows)
            ends = np.union1d(owner_ends, share_ends)
            owners = self.piece_owner[pieces][np.searchsorted(owner_ends, ends)]
            found = np.searchsorted(share_ends, ends), owners, np.diff(ends, prepend=0)
            self._runs[item, degree] = found
        return found


@dataclass(frozen=True, slots=True)
class Encoding:
    """Who encodes each segment.

    Args:
        members: int64 [n]; the member, for a long segment the first of its subgroup.
        degrees: int64 [n]; members that share it, 1 for a short segment.
    """

    members: IntArray
    degrees: IntArray

    @property
    def long_items(self) -> list[int]:
        """Segments that several members share, ascending."""
        found: list[int] = np.flatnonzero(self.degrees > 1).tolist()
        return found


def whole(members: IntArray) -> Encoding:
    """Return the encoding in which no segment is shared."""
    return Encoding(members=members, degrees=np.ones(len(members), dtype=np.int64))


def shares_of(load: MediaLoad, item: int, degree: int) -> Shares:
    """Return the shares of a segment that is known to divide so."""
    shares = load.shares(item, degree)
    assert shares is not None, f"segment {item} does not divide into {degree}"
    return shares


def member_loads(load: MediaLoad, encoding: Encoding) -> FloatArray:
    """Return the encoding time of each member, float64 [members]."""
    return _sums(load, encoding, load.costs, lambda shares: shares.costs)


def member_bytes(load: MediaLoad, encoding: Encoding) -> FloatArray:
    """Return the activations that each member keeps, float64 [members]."""
    return _sums(load, encoding, load.num_bytes, lambda shares: shares.num_bytes)


def fits(load: MediaLoad, encoding: Encoding) -> bool:
    """Return whether no member keeps more than the cap."""
    if load.max_bytes == np.inf:
        return True
    return bool(member_bytes(load, encoding).max(initial=0.0) <= load.max_bytes)


def makespan(load: MediaLoad, encoding: Encoding) -> float:
    """Return the largest load; 0 without segments."""
    return float(member_loads(load, encoding).max(initial=0.0))


def exchange_time(load: MediaLoad, encoding: Encoding, price: ExchangePrice) -> float:
    """Return the time of the exchange that takes all rows to their owners."""
    return price(*travel(load, encoding))


def travel(load: MediaLoad, encoding: Encoding) -> Runs:
    """Return (maker, owner, rows) of every run of rows, int64 [runs] each, those that stay included.

    A run is a piece of a segment, cut where a share ends.
    """
    long_items = encoding.long_items
    if not long_items:
        return encoding.members[load.piece_item], load.piece_owner, load.piece_rows
    is_short = encoding.degrees[load.piece_item] == 1
    runs = [
        (
            encoding.members[load.piece_item[is_short]],
            load.piece_owner[is_short],
            load.piece_rows[is_short],
        )
    ]
    for item in long_items:
        makers, owners, lengths = load.runs(item, int(encoding.degrees[item]))
        runs.append((encoding.members[item] + makers, owners, lengths))
    sender, owner, rows = (np.concatenate(column) for column in zip(*runs, strict=True))
    return sender, owner, rows


def main_owners(load: MediaLoad) -> IntArray:
    """Return the member that owns most rows of each segment, int64 [n]; home for one without rows."""
    order = np.lexsort((load.piece_owner, -load.piece_rows, load.piece_item))
    items, first = np.unique(load.piece_item[order], return_index=True)
    owners = load.home.copy()
    owners[items] = load.piece_owner[order[first]]
    return owners


def _sums(
    load: MediaLoad, encoding: Encoding, values: FloatArray, of_share: Callable[[Shares], FloatArray]
) -> FloatArray:
    """Sum over each member: ``values`` [n] of its whole segments, and ``of_share`` of its shares."""
    long_items = encoding.long_items
    if not long_items:
        return bin_loads(values, encoding.members, load.num_members)
    is_short = encoding.degrees == 1
    sums = bin_loads(values[is_short], encoding.members[is_short], load.num_members)
    for degree in load.subgroups:
        items = np.flatnonzero(encoding.degrees == degree)
        shares = [of_share(shares_of(load, item, degree)) for item in items.tolist()]
        members = encoding.members[items][:, None] + np.arange(degree)
        np.add.at(sums, members, np.reshape(shares, members.shape))
    return sums

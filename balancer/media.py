"""Where the media of one microbatch are encoded: the best of some placements, by makespan plus exchange.

Media go to any rank of the group. Their start is home, the first rank that owns positions of their pack; a
move must pay, and so must sharing: of home, a repair of home, a repair of the owners of the rows, and a free
assignment, each without and with some choices of long segments (``balancer.lssp``), the one wins whose
makespan plus exchange is shortest. No member keeps more bytes than the cap.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from balancer.encoding import (
    Encoding,
    ExchangePrice,
    MediaLoad,
    exchange_time,
    fits,
    main_owners,
    makespan,
    shares_of,
    whole,
)
from balancer.lssp import long_sets
from balancer.partition import FloatArray, IntArray, balance, bin_loads, lower_bound, lpt, refine

# Choices of long segments that are placed in earnest.
MAX_TRIED = 12
# A makespan this near to what cannot be gone below is good enough.
NEAR_ENOUGH = 1.01


def place_media(
    load: MediaLoad, price: ExchangePrice, *, forced: IntArray | None = None, search: bool = True
) -> Encoding | None:
    """Return who encodes each segment, or None if no placement was found that keeps the cap.

    Unless segments are forced long, or home breaks the cap, the makespan is never above that of home, nor
    makespan plus exchange above what they are without sharing. With free exchanges and no cap the makespan is
    within the bound of LPT.

    Args:
        load: The segments of a microbatch.
        price: Time of an exchange.
        forced: int64 [n]; least degree of each segment; None is 1.
        search: Whether others may become long too.
    """
    if forced is None:
        forced = np.ones(len(load.costs), dtype=np.int64)
    best = _Best(load, price)
    home = whole(load.home)
    if (forced == 1).all() and fits(load, home):
        best.limit = makespan(load, home)
        best.offer(home)
    owners = main_owners(load)
    starts = [load.home] if np.array_equal(owners, load.home) else [load.home, owners]
    if best.makespan > lower_bound(load.costs, load.num_members):
        for encoding in _placements(load, forced, starts):
            best.offer(encoding)
    if search and best.makespan > NEAR_ENOUGH * load.mean:
        for choice in long_sets(load, forced)[:MAX_TRIED]:
            if best.makespan <= NEAR_ENOUGH * choice.bound:
                break
            for encoding in _placements(load, choice.degrees, starts):
                best.offer(encoding)
    if best.encoding is None:
        for encoding in _by_bytes(load, forced, search=search):
            best.offer(encoding)
    return best.encoding


class _Best:
    """The best placement offered so far."""

    def __init__(self, load: MediaLoad, price: ExchangePrice) -> None:
        self.load = load
        self.price = price
        self.limit = np.inf
        self.encoding: Encoding | None = None
        self.time = self.makespan = np.inf

    def offer(self, encoding: Encoding) -> None:
        """Take it if it keeps cap and limit and is shorter; of equal ones the first stays."""
        reached = makespan(self.load, encoding)
        if reached > self.limit or reached >= self.time or not fits(self.load, encoding):
            return
        time = reached + exchange_time(self.load, encoding, self.price)
        if time < self.time:
            self.encoding, self.time, self.makespan = encoding, time, reached


@dataclass(frozen=True, slots=True)
class _Start:
    """The long segments placed: ``members`` int64 [n] (0 for short ones), loads and bytes of each member."""

    members: IntArray
    loads: FloatArray
    num_bytes: FloatArray


def _placements(load: MediaLoad, degrees: IntArray, starts: Sequence[IntArray]) -> Iterator[Encoding]:
    """Yield placements with these degrees: the long segments first, the short ones on what is left."""
    start = _place_long(load, degrees)
    if start is None:
        return
    short = np.flatnonzero(degrees == 1)
    for where in starts:
        yield Encoding(_repair(load, start, short, where), degrees)
    if len(short) == len(degrees) and load.max_bytes == np.inf:
        yield Encoding(_near_owners(load, balance(load.costs, load.num_members)), degrees)
    else:
        members = start.members.copy()
        members[short] = _fill(load, short, start.loads, start.num_bytes)
        yield Encoding(_refined(load, start, short, members), degrees)


def _place_long(load: MediaLoad, degrees: IntArray) -> _Start | None:
    """Give each long segment the subgroup whose largest load with it is least; None if the cap forbids all.

    Wide ones first, so that members of a narrower subgroup carry like loads; of equal subgroups the one that
    owns most rows, then the first.
    """
    members = np.zeros(len(degrees), dtype=np.int64)
    loads, used = np.zeros(load.num_members), np.zeros(load.num_members)
    for item in np.lexsort((-load.costs, -degrees)).tolist():
        degree = int(degrees[item])
        if degree == 1:
            break
        groups, shares = load.subgroups[degree], shares_of(load, item, degree)
        reached = (loads[groups] + shares.costs).max(axis=1)
        if load.max_bytes < np.inf:
            reached[(used[groups] + shares.num_bytes).max(axis=1) > load.max_bytes] = np.inf
        least = reached.min()
        if least == np.inf:
            return None
        groups = groups[reached == least]
        group = groups[_rows_owned(load, item)[groups].sum(axis=1).argmax() if len(groups) > 1 else 0]
        members[item] = group[0]
        loads[group] += shares.costs
        used[group] += shares.num_bytes
    return _Start(members, loads, used)


def _rows_owned(load: MediaLoad, item: int) -> FloatArray:
    """Rows of a segment that each member owns, float64 [members]."""
    pieces = slice(*np.searchsorted(load.piece_item, [item, item + 1]).tolist())
    return bin_loads(load.piece_rows[pieces].astype(np.float64), load.piece_owner[pieces], load.num_members)


def _repair(load: MediaLoad, start: _Start, short: IntArray, where: IntArray) -> IntArray:
    """Leave at ``where`` what fits under the least possible makespan, longest first; the rest goes by LPT."""
    total = float(load.costs[short].sum() + start.loads.sum()) / load.num_members
    limit = max(total, float(load.costs[short].max(initial=0.0)), float(start.loads.max()))
    # Plain lists: a loop over single items of an array is several times slower.
    costs, places = load.costs.tolist(), where.tolist()
    sizes = load.num_bytes.tolist() if load.max_bytes < np.inf else [0.0] * len(costs)
    loads, used = start.loads.tolist(), start.num_bytes.tolist()
    evicted: list[int] = []
    for item in short[np.argsort(-load.costs[short], kind="stable")].tolist():
        member = places[item]
        if loads[member] + costs[item] <= limit and used[member] + sizes[item] <= load.max_bytes:
            loads[member] += costs[item]
            used[member] += sizes[item]
        else:
            evicted.append(item)
    members = start.members.copy()
    members[short] = where[short]
    left = np.asarray(evicted, dtype=np.int64)
    members[left] = _fill(load, left, np.asarray(loads), np.asarray(used))
    return _refined(load, start, short, members)


def _refined(load: MediaLoad, start: _Start, short: IntArray, members: IntArray) -> IntArray:
    """Move and swap short segments between the heaviest and the lightest; not where the cap would break."""
    refined = members.copy()
    refined[short] = refine(load.costs[short], members[short], load.num_members, fixed=start.loads)
    if load.max_bytes < np.inf:
        used = start.num_bytes + bin_loads(load.num_bytes[short], refined[short], load.num_members)
        if used.max() > load.max_bytes:
            return members
    return refined


def _fill(load: MediaLoad, items: IntArray, loads: FloatArray, used: FloatArray) -> IntArray:
    """LPT of ``items`` upon ``loads``; each to the least loaded member that has room for its bytes.

    One that fits nowhere goes to the member with the fewest bytes: the cap is checked of the whole.
    """
    if load.max_bytes == np.inf:
        return lpt(load.costs[items], load.num_members, loads=loads)
    costs, sizes, room = load.costs.tolist(), load.num_bytes.tolist(), used.tolist()
    heap = [(value, member) for member, value in enumerate(loads.tolist())]
    heapq.heapify(heap)
    members = np.zeros(len(items), dtype=np.int64)
    for place in np.argsort(-load.costs[items], kind="stable").tolist():
        item = int(items[place])
        full = []
        while heap and room[heap[0][1]] + sizes[item] > load.max_bytes:
            full.append(heapq.heappop(heap))
        value, member = heapq.heappop(heap) if heap else full.pop(_emptiest(full, room))
        members[place] = member
        room[member] += sizes[item]
        for entry in (*full, (value + costs[item], member)):
            heapq.heappush(heap, entry)
    return members


def _emptiest(entries: list[tuple[float, int]], used: list[float]) -> int:
    return min(range(len(entries)), key=lambda number: (used[entries[number][1]], entries[number][1]))


def _by_bytes(load: MediaLoad, forced: IntArray, *, search: bool) -> Iterator[Encoding]:
    """Yield placements that even bytes, not time: with what must be long, then with all long that can be."""
    most = forced.copy()
    if search:
        for degree in sorted(load.subgroups):
            divides = [load.shares(item, degree) is not None for item in range(len(forced))]
            most[divides] = degree
    for degrees in (forced, most):
        start = _place_long(load, degrees)
        if start is not None:
            short = np.flatnonzero(degrees == 1)
            members = start.members.copy()
            members[short] = lpt(load.num_bytes[short], load.num_members, loads=start.num_bytes)
            yield Encoding(members, degrees)


def _near_owners(load: MediaLoad, bins: IntArray) -> IntArray:
    """Name the bins after members so that many rows stay where they are needed; loads do not change.

    Greedy on (bin, member) pairs by the rows that stay: at least half of the best matching.
    """
    pairs = bins[load.piece_item] * load.num_members + load.piece_owner
    links, inverse = np.unique(pairs, return_inverse=True)
    rows = np.bincount(inverse, weights=load.piece_rows, minlength=len(links))
    member_of = np.full(load.num_members, -1, dtype=np.int64)
    free = np.ones(load.num_members, dtype=bool)
    for link in links[np.argsort(-rows, kind="stable")].tolist():
        number, member = divmod(link, load.num_members)
        if member_of[number] < 0 and free[member]:
            member_of[number] = member
            free[member] = False
    member_of[member_of < 0] = np.flatnonzero(free)
    return member_of[bins]

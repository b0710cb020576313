"""Grouped reordering: packs to replicas and microbatches, media to encoding ranks.

Ranks meet at every microbatch, so the time of a step is the sum over microbatches of the largest load. For
packs (one per replica and microbatch) that sum has an exact optimum: sort by cost, and let each microbatch
take the next run of packs. Media go to any rank of the group. Their start is home, the first rank that owns
positions of their pack; a move must pay: of home, a repair of home, a repair of the owners of the rows, and a
free assignment the one wins whose makespan plus exchange is shortest.

Everything here is plain numbers. Ranks and replicas are numbered within their group, from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from balancer.partition import FloatArray, IntArray, balance, bin_loads, lower_bound, lpt, makespan, refine
from omni_pipeline.core.topology import Topology

# (rows, messages) of the busiest rank -> time, in the unit of the costs.
TransferTime = Callable[[int, int], float]


def lanes_of_group(group: int, num_lanes: int, topology: Topology) -> tuple[int, ...]:
    """Return the lanes whose packs ``group`` runs, ascending; may be empty."""
    return tuple(range(group, num_lanes, topology.num_groups))


def num_microbatches(num_lanes: int, packs_per_lane: int, topology: Topology) -> int:
    """Return the microbatches of every replica in every step, the same in all groups.

    It is what the group with the most lanes needs; the others run some empty packs.
    """
    lanes = -(-num_lanes // topology.num_groups)
    replicas = topology.num_replicas // topology.num_groups
    return -(-packs_per_lane * lanes // replicas)


@dataclass(frozen=True)
class PackPlacement:
    """Where each pack runs: ``replicas`` and ``microbatches``, int64 [packs], numbered within the group."""

    replicas: IntArray
    microbatches: IntArray


def packs_in_order(num_packs: int, num_replicas: int) -> PackPlacement:
    """Return the unbalanced placement: packs fill one microbatch after the other, in their order."""
    packs = np.arange(num_packs, dtype=np.int64)
    return PackPlacement(replicas=packs % num_replicas, microbatches=packs // num_replicas)


def packs_by_cost(keys: FloatArray, costs: FloatArray, num_replicas: int) -> PackPlacement:
    """Place packs of like key in the same microbatch, and even the total cost of the replicas.

    With ``keys`` equal to ``costs`` the sum over microbatches of the largest cost is the least possible: the
    first j microbatches hold at most j x R packs, so the next largest is never below the sorted one.

    Args:
        keys: float64 [packs]; what decides the microbatch.
        costs: float64 [packs]; what is evened over replicas: in each microbatch the heaviest pack goes to
            the replica with the least so far.
        num_replicas: Replicas of the group.
    """
    order = np.argsort(-keys, kind="stable")
    replicas = np.zeros(len(keys), dtype=np.int64)
    microbatches = np.zeros(len(keys), dtype=np.int64)
    totals = np.zeros(num_replicas)
    for microbatch, start in enumerate(range(0, len(order), num_replicas)):
        row = order[start : start + num_replicas]
        row = row[np.argsort(-costs[row], kind="stable")]
        lightest = np.argsort(totals, kind="stable")[: len(row)]
        replicas[row] = lightest
        microbatches[row] = microbatch
        totals[lightest] += costs[row]
    return PackPlacement(replicas=replicas, microbatches=microbatches)


def step_makespan(costs: FloatArray, microbatches: IntArray) -> float:
    """Return the sum over microbatches of the largest pack cost."""
    largest = np.zeros(int(microbatches.max(initial=-1)) + 1)
    np.maximum.at(largest, microbatches, costs)
    return float(largest.sum())


@dataclass(frozen=True)
class MediaLoad:
    """The media segments of one microbatch of a group.

    Args:
        costs: float64 [n]; time to encode each.
        home: int64 [n]; the member that encodes it if nothing is balanced.
        piece_item: int64 [p]; a piece is what one member owns of a segment's rows. Which segment.
        piece_owner: int64 [p]; which member.
        piece_rows: int64 [p]; how many rows.
        num_members: Ranks of the group.
    """

    costs: FloatArray
    home: IntArray
    piece_item: IntArray
    piece_owner: IntArray
    piece_rows: IntArray
    num_members: int


def exchange_time(load: MediaLoad, members: IntArray, transfer: TransferTime) -> float:
    """Return the time of the busiest member to send or receive its rows, with ``members`` encoding."""
    sender = members[load.piece_item]
    away = sender != load.piece_owner
    if not away.any():
        return 0.0
    sender, owner, rows = sender[away], load.piece_owner[away], load.piece_rows[away]
    links = np.unique(sender * load.num_members + owner)
    busiest_rows = max(int(np.bincount(end, weights=rows).max()) for end in (sender, owner))
    ends = (links // load.num_members, links % load.num_members)
    busiest_messages = max(int(np.bincount(end).max()) for end in ends)
    return transfer(busiest_rows, busiest_messages)


def place_media(load: MediaLoad, transfer: TransferTime) -> IntArray:
    """Return the member that encodes each segment, int64 [n]; the makespan is never above that of home.

    With free transfers the makespan is also within the bound of LPT.
    """
    best = load.home
    home_makespan = makespan(load.costs, load.home, load.num_members)
    if home_makespan <= lower_bound(load.costs, load.num_members):
        return best
    best_time = home_makespan + exchange_time(load, best, transfer)
    owners = main_owners(load)
    candidates = [_repair(load, load.home), _near_owners(load, balance(load.costs, load.num_members))]
    if not np.array_equal(owners, load.home):
        candidates.append(_repair(load, owners))
    for members in candidates:
        reached = makespan(load.costs, members, load.num_members)
        time = reached + exchange_time(load, members, transfer)
        if reached <= home_makespan and time < best_time:
            best, best_time = members, time
    return best


def main_owners(load: MediaLoad) -> IntArray:
    """Return the member that owns most rows of each segment, int64 [n]; home for one without rows."""
    order = np.lexsort((load.piece_owner, -load.piece_rows, load.piece_item))
    items, first = np.unique(load.piece_item[order], return_index=True)
    owners = load.home.copy()
    owners[items] = load.piece_owner[order[first]]
    return owners


def _repair(load: MediaLoad, start: IntArray) -> IntArray:
    """Leave at ``start`` what fits under the least possible makespan, longest first; the rest goes by LPT."""
    limit = lower_bound(load.costs, load.num_members)
    # Plain lists: a loop over single items of an array is several times slower.
    costs, starts = load.costs.tolist(), start.tolist()
    kept = [0.0] * load.num_members
    evicted: list[int] = []
    for item in np.argsort(-load.costs, kind="stable").tolist():
        member = starts[item]
        if kept[member] + costs[item] <= limit:
            kept[member] += costs[item]
        else:
            evicted.append(item)
    members = start.copy()
    members[evicted] = lpt(load.costs[evicted], load.num_members, loads=np.asarray(kept))
    return refine(load.costs, members, load.num_members)


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


def member_loads(load: MediaLoad, members: IntArray) -> FloatArray:
    """Return the encoding time of each member, float64 [members]."""
    return bin_loads(load.costs, members, load.num_members)

"""Grouped reordering: packs to replicas and microbatches.

Ranks meet at every microbatch, so the time of a step is the sum over microbatches of the largest load. For
packs (one per replica and microbatch) that sum has an exact optimum: sort by cost, and let each microbatch
take the next run of packs. Media follow (``balancer.media``).

Everything here is plain numbers. Replicas are numbered within their group, from 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from balancer.partition import FloatArray, IntArray
from omni_pipeline.core.topology import Topology


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

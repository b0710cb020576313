"""Rows between encoding ranks and the ranks that own their positions, priced as the plan sends them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from balancer.exchange import ExchangePricer
from balancer.layout import SequenceLayout, runs_of_shares
from balancer.nodes import GroupNodes, group_nodes
from balancer.partition import IntArray
from balancer.simulator.setup import Setup
from balancer.simulator.work import PlacedSegment
from omni_pipeline.core.plan import EXACT, StepPlan


@dataclass(frozen=True, slots=True)
class Exchange:
    """The rows of one microbatch of some replicas, and their gradients.

    Args:
        makers: Ranks that take part on the way to the owners.
        owners: Ranks that take part on the way back.
        forward_s: Seconds of the slowest member, once all are ready.
        backward_s: The same on the way back.
    """

    makers: tuple[int, ...]
    owners: tuple[int, ...]
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Moves:
    """Rows from who makes them to who owns them, int64 [pieces] each; ranks of the run."""

    maker: IntArray
    owner: IntArray
    rows: IntArray


def planned_exchanges(
    plans: Sequence[StepPlan], segments: Sequence[PlacedSegment], setup: Setup
) -> dict[tuple[int, int], Exchange]:
    """Return the exchange of every (group, microbatch): all ranks of the group, in the plan's kind."""
    plan_of = {replica: plan for plan in plans for replica in plan.replicas}
    by_group: dict[int, list[PlacedSegment]] = {plan.group: [] for plan in plans}
    for item in segments:
        by_group[plan_of[item.replica].group].append(item)
    found = {}
    for plan in plans:
        pricer = ExchangePricer(setup.cost_model, group_nodes(setup.topology, plan.group))
        ranks = np.asarray(plan.ranks)
        moved = moved_rows(by_group[plan.group], setup, num_microbatches=plan.num_microbatches)
        for microbatch, moves in enumerate(moved):
            maker, owner = np.searchsorted(ranks, moves.maker), np.searchsorted(ranks, moves.owner)
            seconds = pricer.seconds(plan.exchanges[microbatch], maker, owner, moves.rows) / 2
            found[plan.group, microbatch] = Exchange(plan.ranks, plan.ranks, seconds, seconds)
    return found


def moved_rows(segments: Sequence[PlacedSegment], setup: Setup, *, num_microbatches: int) -> list[Moves]:
    """Return the rows of each microbatch, by piece of a segment that one rank makes and one owns."""
    layout = SequenceLayout(setup.topology, setup.seq_len, setup.sequence)
    shares = [
        (number, rank, start, rows)
        for number, item in enumerate(segments)
        for rank, rows, start in zip(
            item.ranks, item.shares, itertools.accumulate(item.shares, initial=0), strict=False
        )
    ]
    runs = runs_of_shares([item.runs for item in segments], shares)
    number, maker, start, rows = np.asarray(shares, dtype=np.int64).reshape(-1, 4).T
    positions = np.asarray([item.position for item in segments], dtype=np.int64)
    lengths = np.asarray([item.length for item in segments], dtype=np.int64)
    owners = np.asarray([layout.owners(item.replica) for item in segments], dtype=np.int64)
    microbatches = np.asarray([item.microbatch for item in segments], dtype=np.int64)
    pieces = layout.cut(positions[number] + start, rows, lengths[number], runs)
    item = number[pieces.item]
    maker, owner = maker[pieces.item], owners.reshape(-1, layout.num_owners)[item, pieces.owner]
    order = np.argsort(microbatches[item], kind="stable")
    ends = np.searchsorted(microbatches[item][order], np.arange(1, num_microbatches))
    return [Moves(maker[part], owner[part], pieces.rows[part]) for part in np.split(order, ends)]


def exchange_s(moves: Moves, setup: Setup) -> float:
    """Return the seconds of an exact exchange between any ranks of the run, there and back."""
    pricer = ExchangePricer(setup.cost_model, _all_nodes(setup))
    return pricer.seconds(EXACT, moves.maker, moves.owner, moves.rows)


def _all_nodes(setup: Setup) -> GroupNodes:
    """All ranks of the run by node, as one group."""
    per_node = setup.hardware.ranks_per_node
    ranks = np.arange(setup.topology.world_size)
    return GroupNodes(ranks // per_node, ranks % per_node, tuple(np.bincount(ranks // per_node).tolist()))

"""Rows between encoding ranks and the ranks that own their positions, priced as the plan sends them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from balancer.layout import SequenceLayout
from balancer.partition import IntArray
from balancer.simulator.setup import Setup
from omni_pipeline.core.plan import EXACT, ExchangeKind, MediaPlacement, StepPlan


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


def planned_exchanges(plans: Sequence[StepPlan], setup: Setup) -> dict[tuple[int, int], Exchange]:
    """Return the exchange of every (group, microbatch): all ranks of the group, in the plan's kind."""
    layout = SequenceLayout(setup.topology, setup.seq_len, setup.sequence)
    found = {}
    for plan in plans:
        for microbatch, moves in enumerate(moved_rows(plan, plan.media, layout)):
            seconds = exchange_s(moves, kind=plan.exchanges[microbatch], setup=setup) / 2
            found[plan.group, microbatch] = Exchange(plan.ranks, plan.ranks, seconds, seconds)
    return found


def moved_rows(plan: StepPlan, media: Sequence[MediaPlacement], layout: SequenceLayout) -> list[Moves]:
    """Return the rows of each microbatch.

    Args:
        plan: Says where packs run.
        media: Who encodes what.
        layout: Who owns which positions.
    """
    shares = [
        (number, rank, item.position + start, rows)
        for number, item in enumerate(media)
        for rank, rows, start in zip(
            item.ranks, item.shares, itertools.accumulate(item.shares, initial=0), strict=False
        )
    ]
    number, maker, position, rows = np.asarray(shares, dtype=np.int64).reshape(-1, 4).T
    lengths = np.asarray([layout.length(plan.packs[item.pack]) for item in media], dtype=np.int64)
    owners = [layout.owners(plan.slots[item.pack].replica) for item in media]
    owner_table = np.asarray(owners, dtype=np.int64).reshape(-1, layout.num_owners)
    microbatch = np.asarray([item.microbatch for item in media], dtype=np.int64)
    pieces = layout.cut(position, rows, lengths[number])
    owner = owner_table[number[pieces.item], pieces.owner]
    when = microbatch[number[pieces.item]]
    return [
        Moves(maker[pieces.item][when == index], owner[when == index], pieces.rows[when == index])
        for index in range(plan.num_microbatches)
    ]


def exchange_s(moves: Moves, *, kind: ExchangeKind = EXACT, setup: Setup) -> float:
    """Return the seconds that the busiest rank spends on rows travelling and their gradients back."""
    maker, owner, rows = moves.maker, moves.owner, moves.rows
    total = int(rows.sum())
    away = maker != owner
    if not away.any():
        return 0.0
    maker, owner, rows = maker[away], owner[away], rows[away]
    per_node = setup.hardware.ranks_per_node
    if kind == "two_level":
        # First inside the node, to the rank whose place is that of the owner in its node.
        relay = maker // per_node * per_node + owner % per_node
        inside, between = _busiest(maker, relay, rows), _busiest(relay, owner, rows)
    else:
        near = maker // per_node == owner // per_node
        inside = _busiest(maker[near], owner[near], rows[near])
        between = _busiest(maker[~near], owner[~near], rows[~near])
    return setup.cost_model.exchange_cost(
        kind,
        num_rows=inside[0],
        num_messages=inside[1],
        num_rows_network=between[0],
        num_messages_network=between[1],
        total_rows=total,
    )


def _busiest(source: IntArray, target: IntArray, rows: IntArray) -> tuple[int, int]:
    """Return the most rows and the most messages that one rank sends or receives."""
    moves = source != target
    if not moves.any():
        return 0, 0
    source, target, rows = source[moves], target[moves], rows[moves]
    most_rows = max(int(np.bincount(end, weights=rows).max()) for end in (source, target))
    links = np.unique(np.stack([source, target]), axis=1)
    most_messages = max(int(np.bincount(end).max()) for end in links)
    return most_rows, most_messages

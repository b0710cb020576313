"""Rows to owners: what each rank sends and receives in one microbatch.

Each embedding row goes to the one rank that owns its sequence position, so nothing counts twice in backward.
All members put runs of rows in the same global order (encoder, then ``StepPlan.media``, then row), and each
sorts those of a hop stably by their other end: what one member sends is, row for row, what another expects.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from balancer.layout import SequenceLayout, runs_of_shares
from balancer.nodes import GroupNodes, group_nodes
from balancer.partition import IntArray
from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.interleave import Runs, joint_layout
from omni_pipeline.core.plan import ExchangeKind, MediaPlacement, Pack, StepPlan
from omni_pipeline.core.reshard import AllToAll, Hop, ReshardPlan, Scope, SumBuffer
from omni_pipeline.core.sample import Modality, Segment

# What ``MediaPlaces.places`` says of a segment, by the names of ``MediaPlacement``.
PLACE_FIELDS = ("pack", "sample", "segment", "position", "num_rows")
POSITION = PLACE_FIELDS.index("position")


class MediaPlaces(NamedTuple):
    """Where media are and their rows go.

    Args:
        segments: By pack, sample, segment.
        places: int64 [media, 5], see ``PLACE_FIELDS``: three indices; the position of the first row in the
            pack's sequence; rows.
        runs: By number of the segment, where its rows are: of clips and their sound only, whose rows do not
            all follow the first.
    """

    segments: list[Segment]
    places: IntArray
    runs: dict[int, Runs]


def media_places(packs: Sequence[Pack]) -> MediaPlaces:
    """Return where the media of ``packs`` are and their rows go, as ``core.interleave`` lays them out."""
    text = Modality.TEXT
    # One flat list: thousands of tuples that live on wake the garbage collector again and again.
    found: list[int] = []
    segments: list[Segment] = []
    runs: dict[int, Runs] = {}
    for pack_index, pack in enumerate(packs):
        start = 0
        for sample_index, sample in enumerate(pack.samples):
            position = start
            for segment_index, segment in enumerate(sample.segments):
                if segment.modality is not text:
                    segments.append(segment)
                    found += (pack_index, sample_index, segment_index, position + 1, segment.num_rows)
                    if segment.is_track:
                        clip = sample.segments[segment_index - 1] if segment_index else segment
                        pair = joint_layout(clip, segment, position - clip.num_tokens)
                        for number, layout in zip((-2, -1), pair, strict=True):
                            runs[len(segments) + number] = layout.runs
                            found[len(PLACE_FIELDS) * number + POSITION] = layout.runs[0][0]
                position += segment.num_tokens
            start += pack.padded_len or sample.num_tokens
    places = np.asarray(found, dtype=np.int64).reshape(-1, len(PLACE_FIELDS))
    return MediaPlaces(segments, places, runs)


@dataclass(frozen=True)
class Routes:
    """From whom to whom the rows of one microbatch go, in runs of consecutive rows, in global order.

    Members are the ranks of the group, numbered from 0; arrays are int64 [runs].

    Args:
        maker: The member whose encoder makes the rows.
        owner: The member that owns their positions; may be the maker.
        rows: How many, at least 1.
        source: The first of them in the maker's outputs.
        local: Local sequence position of the first at the owner; the others follow.
        num_made: int64 [members]; rows that each member makes.
        nodes: The group's members by node.
    """

    maker: IntArray
    owner: IntArray
    rows: IntArray
    source: IntArray
    local: IntArray
    num_made: IntArray
    nodes: GroupNodes


def build_routes(
    plan: StepPlan, *, microbatch: int, layout: SequenceLayout, encoders: Sequence[str]
) -> Routes:
    """Return the routes of ``microbatch``.

    Args:
        plan: The plan of the group.
        microbatch: Of the step.
        layout: Who owns which positions.
        encoders: All encoders of the run, in the order in which their outputs are concatenated.

    Raises:
        PlanError: A segment's encoder is not in ``encoders``.
    """
    items = _in_row_order(plan, microbatch, encoders)
    shares = [
        (number, rank, start, rows)
        for number, item in enumerate(items)
        for rank, rows, start in zip(
            item.ranks, item.shares, itertools.accumulate(item.shares, initial=0), strict=False
        )
    ]
    number, rank, start, rows = np.asarray(shares, dtype=np.int64).reshape(-1, 4).T
    ranks = np.asarray(plan.ranks, dtype=np.int64)
    maker = np.searchsorted(ranks, rank)
    positions = np.asarray([item.position for item in items], dtype=np.int64)
    runs = runs_of_shares([item.runs for item in items], shares)
    # By pack, not by segment: there are many segments to a pack.
    packs, pack = np.unique(np.asarray([item.pack for item in items], dtype=np.int64), return_inverse=True)
    lengths = np.asarray([layout.length(plan.packs[index]) for index in packs.tolist()], dtype=np.int64)
    owners = [layout.owners(plan.slots[index].replica) for index in packs.tolist()]
    pieces = layout.cut(positions[number] + start, rows, lengths[pack][number], runs)
    owner_table = np.asarray(owners, dtype=np.int64).reshape(-1, layout.num_owners)
    owning = owner_table[pack[number[pieces.item]], pieces.owner]
    return Routes(
        maker=maker[pieces.item],
        owner=np.searchsorted(ranks, owning),
        rows=pieces.rows,
        source=_source(maker, rows)[pieces.item] + pieces.first_row,
        local=pieces.local,
        num_made=np.bincount(maker, weights=rows, minlength=len(ranks)).astype(np.int64),
        nodes=group_nodes(layout.topology, plan.group),
    )


def reshard_plan(routes: Routes, *, kind: ExchangeKind, member: int) -> ReshardPlan:
    """Return the part of ``member`` in an exchange of ``kind``.

    Raises:
        PlanError: Two hops are asked for in a group that is not evenly spread over several nodes.
    """
    moves = bool((routes.maker != routes.owner).any())
    held = _Held(routes, member)
    hops: tuple[Hop, ...] = ()
    if moves and kind == "symmetric":
        hops = (_sum_buffer(held),)
    elif moves and kind == "two_level":
        if not routes.nodes.has_rails:
            raise PlanError(
                f"two hops in a group whose nodes have {routes.nodes.counts} of its ranks",
                fix="report this: the planner is at fault",
            )
        relay = routes.nodes.relay(routes.maker, routes.owner)
        hops = _all_to_all(held, relay, "node"), _all_to_all(held, routes.owner, "rail")
    elif moves:
        hops = (_all_to_all(held, routes.owner, "group"),)
    mine = routes.owner == member
    positions = _expand(routes.local[mine], routes.rows[mine])
    order = np.argsort(positions)
    return ReshardPlan(
        hops=hops,
        take_rows=_expand(held.first[mine], routes.rows[mine])[order],
        positions=positions[order],
    )


class _Held:
    """Where the rows are while they travel, and which of them one member holds.

    ``holder``: the member that each run is with. ``first``: its first row among the rows that ``member``
    holds, -1 if it does not. ``num_rows``: how many rows that are.
    """

    def __init__(self, routes: Routes, member: int) -> None:
        self.routes = routes
        self.member = member
        self.holder = routes.maker
        self.first = np.where(routes.maker == member, routes.source, -1)
        self.num_rows = int(routes.num_made[member])

    def receive(self, runs: IntArray) -> None:
        """Append these runs, in the order in which they arrive."""
        rows = self.routes.rows[runs]
        self.first[runs] = self.num_rows + _starts(rows)
        self.num_rows += int(rows.sum())


def _all_to_all(held: _Held, target: IntArray, scope: Scope) -> AllToAll:
    """Move every run from its holder to ``target``."""
    routes, member, holder = held.routes, held.member, held.holder
    sent = np.flatnonzero((holder == member) & (target != member))
    sent = sent[np.argsort(target[sent], kind="stable")]
    received = np.flatnonzero((target == member) & (holder != member))
    received = received[np.argsort(holder[received], kind="stable")]
    members = routes.nodes.members_of(scope, member)
    hop = AllToAll(
        scope=scope,
        send_rows=_expand(held.first[sent], routes.rows[sent]),
        send_splits=_splits(target[sent], routes.rows[sent], members),
        recv_splits=_splits(holder[received], routes.rows[received], members),
    )
    held.receive(received)
    held.holder = target
    return hop


def _sum_buffer(held: _Held) -> SumBuffer:
    """Give every row that moves in the group a place, in the global order."""
    routes, member = held.routes, held.member
    rows = np.where(routes.maker != routes.owner, routes.rows, 0)
    places = _starts(rows)
    sent = np.flatnonzero((routes.maker == member) & (rows > 0))
    received = np.flatnonzero((routes.owner == member) & (rows > 0))
    hop = SumBuffer(
        num_places=int(rows.sum()),
        send_rows=_expand(held.first[sent], rows[sent]),
        send_places=_expand(places[sent], rows[sent]),
        recv_places=_expand(places[received], rows[received]),
    )
    held.receive(received)
    held.holder = routes.owner
    return hop


def _in_row_order(plan: StepPlan, microbatch: int, encoders: Sequence[str]) -> list[MediaPlacement]:
    """The media of a microbatch by encoder; stable, so in the plan's order within one encoder."""
    order = {name: number for number, name in enumerate(encoders)}
    try:
        return sorted(plan.media_in(microbatch), key=lambda item: order[item.encoder])
    except KeyError as error:
        raise PlanError(
            f"plan uses encoder {error.args[0]!r}, the run has {', '.join(order) or 'none'}"
        ) from error


def _source(maker: IntArray, rows: IntArray) -> IntArray:
    """Return where each share begins among the rows of its maker, int64 [shares]."""
    order = np.argsort(maker, kind="stable")
    starts = _starts(rows[order])
    makers = maker[order]
    found = np.empty_like(rows)
    found[order] = starts - starts[np.searchsorted(makers, makers)]
    return found


def _starts(rows: IntArray) -> IntArray:
    """Return the sum of all rows before each."""
    starts: IntArray = np.cumsum(rows) - rows
    return starts


def _expand(first: IntArray, rows: IntArray) -> IntArray:
    """Return the single rows of runs, each given by its first row and its length."""
    expanded: IntArray = np.repeat(first - _starts(rows), rows) + np.arange(int(rows.sum()))
    return expanded


def _splits(ends: IntArray, rows: IntArray, members: IntArray) -> tuple[int, ...]:
    """Return the rows whose other end is each of ``members``."""
    counts = np.bincount(ends, weights=rows, minlength=int(members[-1]) + 1).astype(np.int64)
    return tuple(counts[members].tolist())

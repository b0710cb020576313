"""Exchanges by their definition: owners of positions, rows made, and all hops in one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st

from balancer.layout import SequenceKind, SequenceLayout
from omni_pipeline.core.plan import MediaPlacement, StepPlan
from omni_pipeline.core.reshard import AllToAll, ReshardPlan, Scope, SumBuffer
from omni_pipeline.core.topology import Topology
from tests.support.interleaved import row_positions

Row = tuple[int, int]
"""(number of the segment in the plan, row of the segment)."""


def owned_positions(kind: SequenceKind, length: int, *, tp: int, cp: int) -> list[list[int]]:
    """Return the positions of each owner in their local order; those behind ``length`` are padding."""
    if kind == "stage0":
        return [list(range(length))]
    if kind == "contiguous":
        chunk = max(1, -(-length // (tp * cp)))
        return [list(range(owner * chunk, (owner + 1) * chunk)) for owner in range(tp * cp)]
    chunk = max(1, -(-length // (2 * cp)))
    chunks = [list(range(number * chunk, (number + 1) * chunk)) for number in range(2 * cp)]
    found = []
    for holder in range(cp):
        held = chunks[holder] + chunks[2 * cp - 1 - holder]
        part = -(-len(held) // tp)
        found += [held[place * part : (place + 1) * part] for place in range(tp)]
    return found


def wanted_rows(plan: StepPlan, microbatch: int, layout: SequenceLayout) -> dict[tuple[int, int], Row]:
    """Return the row that must lie at each (rank, local position), one row at a time."""
    topology = layout.topology
    found = {}
    for number, item in enumerate(plan.media):
        if item.microbatch != microbatch:
            continue
        length = layout.length(plan.packs[item.pack])
        owned = owned_positions(layout.kind, length, tp=topology.tp, cp=topology.cp)
        owners = topology.row_owners(plan.slots[item.pack].replica)
        pack = plan.packs[item.pack]
        rows = row_positions(pack.samples[item.sample], item.segment)
        for row, position in enumerate(rows):
            position += pack.starts[item.sample]
            ((owner, local),) = [
                (owner, held.index(position)) for owner, held in enumerate(owned) if position in held
            ]
            found[owners[owner], local] = (number, row)
    return found


def made_rows(plan: StepPlan, *, rank: int, microbatch: int, encoders: Sequence[str]) -> list[Row]:
    """Return what the encoders of ``rank`` make, encoder by encoder."""
    return [
        (number, row)
        for name in encoders
        for number, item in enumerate(plan.media)
        if item.microbatch == microbatch and item.encoder == name
        for row in item.rows_of(rank)
    ]


def run_hops(
    reshards: Sequence[ReshardPlan], made: Sequence[list[Row]], topology: Topology, group: int
) -> list[list[Row]]:
    """Run all hops of a group; return the rows that each member takes."""
    ranks = topology.ranks_of_group(group)
    held = [list(rows) for rows in made]
    (num_hops,) = {len(reshard.hops) for reshard in reshards}
    for index in range(num_hops):
        hops = [reshard.hops[index] for reshard in reshards]
        received = [_received(hops, held, member, ranks, topology, group) for member in range(len(ranks))]
        for rows, new in zip(held, received, strict=True):
            rows += new
    return [
        [rows[number] for number in reshard.take_rows.tolist()]
        for rows, reshard in zip(held, reshards, strict=True)
    ]


def _received(
    hops: Sequence[AllToAll | SumBuffer],
    held: Sequence[list[Row]],
    member: int,
    ranks: tuple[int, ...],
    topology: Topology,
    group: int,
) -> list[Row]:
    own = hops[member]
    if isinstance(own, SumBuffer):
        buffer: dict[int, Row] = {}
        for hop, rows in zip(hops, held, strict=True):
            assert isinstance(hop, SumBuffer)
            assert hop.num_places == own.num_places
            for number, place in zip(hop.send_rows.tolist(), hop.send_places.tolist(), strict=True):
                assert place not in buffer
                buffer[place] = rows[number]
        assert sorted(buffer) == list(range(own.num_places))
        return [buffer[place] for place in own.recv_places.tolist()]
    members = [ranks.index(rank) for rank in scope_ranks(own.scope, ranks[member], topology, group)]
    received = []
    for sender, num_rows in zip(members, own.recv_splits, strict=True):
        hop = hops[sender]
        assert isinstance(hop, AllToAll)
        assert hop.scope == own.scope
        assert len(hop.send_splits) == len(members)
        place = members.index(member)
        assert hop.send_splits[place] == num_rows
        start = sum(hop.send_splits[:place])
        received += [held[sender][number] for number in hop.send_rows[start : start + num_rows].tolist()]
    return received


def scope_ranks(scope: Scope, rank: int, topology: Topology, group: int) -> tuple[int, ...]:
    """Return the ranks of the group that take part in a hop of ``rank``."""
    if scope == "group":
        return topology.ranks_of_group(group)
    parts = topology.nodes_of_group(group) if scope == "node" else topology.rails_of_group(group)
    (found,) = [part for part in parts if rank in part]
    return found


@st.composite
def with_shares(draw: st.DrawFn, plan: StepPlan) -> StepPlan:
    """The plan with some media encoded by any ranks of the group, in any shares."""

    def placed(item: MediaPlacement) -> MediaPlacement:
        ranks = tuple(draw(st.permutations(plan.ranks)))
        degree = draw(st.integers(1, min(len(ranks), item.num_rows)))
        inner = st.sets(st.integers(1, item.num_rows - 1), min_size=degree - 1, max_size=degree - 1)
        borders = [0, *(sorted(draw(inner)) if degree > 1 else ()), item.num_rows]
        shares = tuple(end - start for start, end in itertools.pairwise(borders))
        return replace(item, ranks=ranks[:degree], shares=shares)

    return replace(plan, media=tuple(placed(item) if draw(st.booleans()) else item for item in plan.media))

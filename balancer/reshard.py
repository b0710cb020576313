"""Rows to owners: what each rank sends and receives in one microbatch.

Each embedding row goes to the one rank that owns its sequence position, so nothing counts twice in backward.
All members put rows in the same global order (encoder, then ``StepPlan.media``, then row), and each sorts it
stably by the other end: what one member sends to another is, row for row, what the other expects.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from balancer.partition import IntArray
from omni_pipeline.core.errors import PlanError
from omni_pipeline.core.plan import MediaPlacement, Pack, ReshardPlan, StepPlan
from omni_pipeline.core.topology import Topology


@functools.lru_cache(maxsize=4096)
def row_owners(topology: Topology, replica: int) -> tuple[int, ...]:
    """Return ``topology.row_owners(replica)``, remembered: it visits every rank of the run."""
    return topology.row_owners(replica)


def chunk_size(num_positions: int, num_owners: int) -> int:
    """Return the positions of every owner but the last, at least 1: equal contiguous chunks, rounded up."""
    return max(1, -(-num_positions // num_owners))


def media_positions(pack: Pack) -> list[tuple[int, int, int]]:
    """Return (sample, segment, first sequence position of its rows) of each media segment of ``pack``.

    The rows stand behind the segment's start marker.
    """
    found = []
    for sample_index, (position, sample) in enumerate(zip(pack.starts, pack.samples, strict=True)):
        for segment_index, segment in enumerate(sample.segments):
            if segment.is_media:
                found.append((sample_index, segment_index, position + 1))
            position += segment.num_tokens
    return found


@dataclass(frozen=True)
class SequenceLayout:
    """Who owns which sequence positions.

    Args:
        topology: The layout of the run.
        seq_len: Positions of every sequence where packs are padded to one length; 0 where each pack keeps its
            own length.
    """

    topology: Topology
    seq_len: int = 0

    def chunk(self, pack: Pack) -> int:
        """Return the positions of each owner of ``pack`` but the last."""
        return chunk_size(self.seq_len or pack.num_positions, self.topology.tp * self.topology.cp)


def reshard_plan(
    plan: StepPlan, *, microbatch: int, rank: int, layout: SequenceLayout, encoders: Sequence[str]
) -> ReshardPlan:
    """Return what ``rank`` sends and receives in ``microbatch``.

    Args:
        plan: The plan of the rank's group.
        microbatch: Of the step.
        rank: Of the whole run.
        layout: Who owns which positions.
        encoders: All encoders of the run, in the order in which their outputs are concatenated.

    Raises:
        PlanError: ``rank`` is not of the plan's group, or a segment's encoder is not in ``encoders``.
    """
    if rank not in plan.ranks:
        raise PlanError(f"rank {rank} is not one of the {len(plan.ranks)} ranks of group {plan.group}")
    order = {name: number for number, name in enumerate(encoders)}
    send_rows, send_splits = _send(plan, microbatch, rank, layout, order)
    recv_positions, recv_splits = _receive(plan, microbatch, rank, layout, order)
    return ReshardPlan(
        send_rows=send_rows,
        send_splits=send_splits,
        recv_splits=recv_splits,
        recv_positions=recv_positions,
    )


def _send(
    plan: StepPlan, microbatch: int, rank: int, layout: SequenceLayout, order: dict[str, int]
) -> tuple[IntArray, tuple[int, ...]]:
    replica_of = {slot.pack: slot.replica for slot in plan.slots if slot.microbatch == microbatch}
    owners = []
    for item in _in_row_order(plan.media_of(rank=rank, microbatch=microbatch), order):
        owners_of_pack = np.asarray(row_owners(layout.topology, replica_of[item.pack]), dtype=np.int64)
        rows = item.rows_of(rank)
        positions = np.arange(item.position + rows.start, item.position + rows.stop)
        owners.append(owners_of_pack[positions // layout.chunk(plan.packs[item.pack])])
    return _by_member(_concatenate(owners), plan.ranks)


def _receive(
    plan: StepPlan, microbatch: int, rank: int, layout: SequenceLayout, order: dict[str, int]
) -> tuple[IntArray, tuple[int, ...]]:
    replica = layout.topology.replica_of(rank)
    owners = row_owners(layout.topology, replica)
    pack = plan.pack_at(replica, microbatch)
    if rank not in owners or pack is None:
        return np.zeros(0, dtype=np.int64), (0,) * len(plan.ranks)
    chunk = layout.chunk(plan.packs[pack])
    start = owners.index(rank) * chunk
    positions, senders = [], []
    for item in _in_row_order((item for item in plan.media if item.pack == pack), order):
        first = max(item.position, start)
        last = min(item.position + item.num_rows, start + chunk)
        if first < last:
            positions.append(np.arange(first - start, last - start, dtype=np.int64))
            makers = np.repeat(np.asarray(item.ranks, dtype=np.int64), item.shares)
            senders.append(makers[first - item.position : last - item.position])
    rows, splits = _by_member(_concatenate(senders), plan.ranks)
    return _concatenate(positions)[rows], splits


def _in_row_order(items: Iterable[MediaPlacement], order: dict[str, int]) -> list[MediaPlacement]:
    """Sort by encoder; stable, so in the plan's order within one encoder."""
    try:
        return sorted(items, key=lambda item: order[item.encoder])
    except KeyError as error:
        raise PlanError(
            f"plan uses encoder {error.args[0]!r}, the run has {', '.join(order) or 'none'}"
        ) from error


def _by_member(ends: IntArray, ranks: tuple[int, ...]) -> tuple[IntArray, tuple[int, ...]]:
    """Return the rows sorted stably by the rank at their other end, and the count for each member."""
    members = np.searchsorted(np.asarray(ranks, dtype=np.int64), ends)
    counts = np.bincount(members, minlength=len(ranks))
    return np.argsort(members, kind="stable").astype(np.int64), tuple(counts.tolist())


def _concatenate(arrays: list[IntArray]) -> IntArray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)

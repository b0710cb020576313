"""One step of a group as arrays, and the ways to place it: unbalanced, or the best of some balanced ones.

Costs are whole ticks here: sums of whole numbers are exact in any order, so machines with different vector
units still make the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from balancer.cost import CostModel
from balancer.layout import RowPieces, SequenceLayout
from balancer.partition import FloatArray, IntArray
from balancer.reorder import (
    MediaLoad,
    PackPlacement,
    exchange_time,
    member_loads,
    packs_by_cost,
    packs_in_order,
    place_media,
    step_makespan,
)
from balancer.reshard import media_positions
from omni_pipeline.core.plan import Pack

# Below 2^53 ticks (25 hours of modelled time in a group and step) sums are exact.
TICKS_PER_S = 1e11


@dataclass(frozen=True, slots=True)
class MediaPlace:
    """One media segment: where it is, and where its rows go."""

    pack: int
    sample: int
    segment: int
    position: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step as arrays.

    Args:
        packs: By lane then number.
        ranks: The members of the group, ascending.
        replicas: Of the group, ascending.
        owners: int64 [replicas, owners]; the members that own positions of each replica's sequence.
        pack_costs: float64 [packs], ticks that a replica needs, its ranks working together.
        media: In the order of packs, samples, segments.
        media_encoders: Encoder of each.
        media_packs: int64 [media].
        media_costs: float64 [media], ticks that one rank needs.
        pieces: The rows of the media, cut where their owner changes.
        cost_model: Prices transfers.
    """

    packs: tuple[Pack, ...]
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    owners: IntArray
    pack_costs: FloatArray
    media: tuple[MediaPlace, ...]
    media_encoders: tuple[str, ...]
    media_packs: IntArray
    media_costs: FloatArray
    pieces: RowPieces
    cost_model: CostModel


@dataclass(frozen=True, slots=True)
class StepPlacement:
    """One way to run the step; ``members``: int64 [media], who encodes each segment."""

    packs: PackPlacement
    members: IntArray
    encoder_ticks: float
    exchange_ticks: float
    llm_ticks: float

    @property
    def step_ticks(self) -> float:
        """Modelled time of the step."""
        return self.encoder_ticks + self.exchange_ticks + self.llm_ticks


def step_inputs(
    packs: tuple[Pack, ...], *, group: int, cost_model: CostModel, layout: SequenceLayout
) -> StepInputs:
    """Return the arrays of a step.

    Raises:
        ConfigError: A segment of a modality that no encoder reads.
    """
    topology = layout.topology
    replicas, ranks = topology.replicas_of_group(group), topology.ranks_of_group(group)
    media = [
        MediaPlace(index, sample, segment, position, pack.samples[sample].segments[segment].num_rows)
        for index, pack in enumerate(packs)
        for sample, segment, position in media_positions(pack)
    ]
    segments = [packs[item.pack].samples[item.sample].segments[item.segment] for item in media]
    owners = [layout.owners(replica) for replica in replicas]
    media_packs = np.asarray([item.pack for item in media], dtype=np.int64)
    lengths = np.asarray([layout.length(pack) for pack in packs], dtype=np.int64)
    return StepInputs(
        packs=packs,
        ranks=ranks,
        replicas=replicas,
        owners=np.searchsorted(np.asarray(ranks), np.asarray(owners)),
        pack_costs=_ticks([cost_model.pack_cost(pack) / topology.ranks_per_replica for pack in packs]),
        media=tuple(media),
        media_encoders=tuple(cost_model.encoder_name(segment) for segment in segments),
        media_packs=media_packs,
        media_costs=_ticks([cost_model.media_cost(segment) for segment in segments]),
        pieces=layout.cut(
            np.asarray([item.position for item in media], dtype=np.int64),
            np.asarray([item.num_rows for item in media], dtype=np.int64),
            lengths[media_packs],
        ),
        cost_model=cost_model,
    )


def place_in_order(inputs: StepInputs) -> StepPlacement:
    """Return the unbalanced placement: packs in order, media at home."""
    return _with_media(inputs, packs_in_order(len(inputs.packs), len(inputs.replicas)), at_home=True)


def place_balanced(inputs: StepInputs, unbalanced: StepPlacement) -> StepPlacement:
    """Of some pack placements take the shortest step without a makespan above the unbalanced one.

    Packs sorted by LLM cost are the optimum of the LLM, but they may spread media-heavy packs over more
    microbatches and so lengthen the encoders' part; the packs in order always qualify.
    """
    num_replicas, costs = len(inputs.replicas), inputs.pack_costs
    media_of_pack = np.bincount(inputs.media_packs, weights=inputs.media_costs, minlength=len(costs))
    placements = (
        packs_in_order(len(costs), num_replicas),
        packs_by_cost(costs, costs, num_replicas),
        packs_by_cost(costs + media_of_pack / len(inputs.ranks), costs, num_replicas),
    )
    found = (_with_media(inputs, placement, at_home=False) for placement in placements)
    allowed = (
        placement
        for placement in found
        if placement.encoder_ticks <= unbalanced.encoder_ticks and placement.llm_ticks <= unbalanced.llm_ticks
    )
    return min(allowed, key=lambda placement: placement.step_ticks)


def _with_media(inputs: StepInputs, packs: PackPlacement, *, at_home: bool) -> StepPlacement:
    def transfer(num_rows: int, num_messages: int) -> float:
        seconds = inputs.cost_model.transfer_cost(num_rows=num_rows, num_messages=num_messages)
        return float(round(seconds * TICKS_PER_S))

    members = np.zeros(len(inputs.media), dtype=np.int64)
    encoder_ticks = exchange_ticks = 0.0
    microbatch_of_media = packs.microbatches[inputs.media_packs]
    for microbatch in np.unique(microbatch_of_media).tolist():
        items = np.flatnonzero(microbatch_of_media == microbatch)
        load = _media_load(inputs, packs, items)
        placed = load.home if at_home else place_media(load, transfer)
        members[items] = placed
        encoder_ticks += float(member_loads(load, placed).max())
        exchange_ticks += exchange_time(load, placed, transfer)
    return StepPlacement(
        packs=packs,
        members=members,
        encoder_ticks=encoder_ticks,
        exchange_ticks=exchange_ticks,
        llm_ticks=step_makespan(inputs.pack_costs, packs.microbatches),
    )


def _ticks(seconds: list[float]) -> FloatArray:
    return np.rint(np.asarray(seconds, dtype=np.float64) * TICKS_PER_S)


def _media_load(inputs: StepInputs, packs: PackPlacement, items: IntArray) -> MediaLoad:
    """The segments ``items`` (ascending) of one microbatch, renumbered from 0."""
    number = np.full(len(inputs.media), -1, dtype=np.int64)
    number[items] = np.arange(len(items))
    here = number[inputs.pieces.item] >= 0
    piece_item = inputs.pieces.item[here]
    replica = packs.replicas[inputs.media_packs]
    return MediaLoad(
        costs=inputs.media_costs[items],
        home=inputs.owners[replica[items], 0],
        piece_item=number[piece_item],
        piece_owner=inputs.owners[replica[piece_item], inputs.pieces.owner[here]],
        piece_rows=inputs.pieces.rows[here],
        num_members=len(inputs.ranks),
    )

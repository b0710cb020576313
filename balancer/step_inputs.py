"""One step of a group as arrays: what its packs and media cost, where rows go, how media may divide.

Costs are whole ticks here: sums of whole numbers are exact in any order, so machines with different vector
units still make the same plan.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from balancer.cost import CostModel
from balancer.encoding import MediaLoad, Shares, ShareTable, subgroups
from balancer.exchange import ExchangePricer, ExchangeSetting
from balancer.layout import RowPieces, SequenceLayout
from balancer.lssp import LsspConfig, forced_degrees
from balancer.nodes import group_nodes
from balancer.partition import FloatArray, IntArray
from balancer.reorder import PackPlacement
from balancer.reshard import media_places
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.interleave import Runs
from omni_pipeline.core.plan import ExchangeKind, Pack
from omni_pipeline.core.sample import Segment

# Below 2^53 ticks (25 hours of modelled time in a group and step) sums are exact.
TICKS_PER_S = 1e11


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step as arrays.

    Args:
        packs: By lane then number.
        ranks: The members of the group, ascending.
        replicas: Of the group, ascending.
        owners: int64 [replicas, owners]; the members that own positions of each replica's sequence.
        pack_costs: float64 [packs], ticks that a replica needs, its ranks working together.
        media: int64 [media, 5], in the order of packs, samples, segments; see ``MediaPlaces.places``.
        media_runs: By segment that is interleaved; see ``MediaPlaces.runs``.
        media_encoders: Encoder of each.
        media_packs: int64 [media].
        media_costs: float64 [media], ticks that one rank needs.
        media_bytes: float64 [media], activations that one rank keeps for the backward; zeros without a cap.
        pieces: The rows of the media, cut where their owner changes.
        pricer: Chooses and prices exchanges.
        subgroups: By degree, the members that may share a segment; see ``MediaLoad``.
        shares: How the media divide.
        forced: int64 [media]; least degree of each.
        lssp: How to search for others.
        max_bytes: Most bytes of media that a rank keeps of one microbatch; infinite without a cap.
    """

    packs: tuple[Pack, ...]
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    owners: IntArray
    pack_costs: FloatArray
    media: IntArray
    media_runs: dict[int, Runs]
    media_encoders: tuple[str, ...]
    media_packs: IntArray
    media_costs: FloatArray
    media_bytes: FloatArray
    pieces: RowPieces
    pricer: ExchangePricer
    subgroups: dict[int, IntArray]
    shares: ShareTable
    forced: IntArray
    lssp: LsspConfig
    max_bytes: float


def step_inputs(
    packs: tuple[Pack, ...],
    *,
    group: int,
    cost_model: CostModel,
    layout: SequenceLayout,
    lssp: LsspConfig,
    encoder_memory_bytes: int,
    exchange: ExchangeSetting,
) -> StepInputs:
    """Return the arrays of a step.

    Raises:
        ConfigError: A segment of a modality that no encoder reads, or one that is above the memory cap
            however it is shared; an exchange that the group does not have.
    """
    topology = layout.topology
    replicas, ranks = topology.replicas_of_group(group), topology.ranks_of_group(group)
    segments, media, runs = media_places(packs)
    media_packs, _, _, positions, num_rows = media.T
    owners = [layout.owners(replica) for replica in replicas]
    lengths = np.asarray([layout.length(pack) for pack in packs], dtype=np.int64)
    nodes = topology.nodes_of_group(group)
    groups = {degree: subgroups(ranks, nodes, degree) for degree in lssp.degrees}
    inputs = StepInputs(
        packs=packs,
        ranks=ranks,
        replicas=replicas,
        owners=np.searchsorted(np.asarray(ranks), np.asarray(owners)),
        pack_costs=_ticks([cost_model.pack_cost(pack) / topology.ranks_per_replica for pack in packs]),
        media=media,
        media_runs=runs,
        media_encoders=tuple(cost_model.encoder_name(segment) for segment in segments),
        media_packs=media_packs,
        media_costs=_ticks([cost_model.media_cost(segment) for segment in segments]),
        media_bytes=_num_bytes(segments, cost_model if encoder_memory_bytes else None),
        pieces=layout.cut(positions, num_rows, lengths[media_packs], runs),
        pricer=ExchangePricer(cost_model, group_nodes(topology, group), exchange),
        subgroups={degree: found for degree, found in groups.items() if len(found)},
        shares=_share_table(segments, cost_model, with_bytes=encoder_memory_bytes > 0),
        forced=np.ones(len(media), dtype=np.int64),
        lssp=lssp,
        max_bytes=encoder_memory_bytes or np.inf,
    )
    return dataclasses.replace(inputs, forced=_forced(inputs))


def media_loads(inputs: StepInputs, packs: PackPlacement) -> Iterator[tuple[IntArray, MediaLoad]]:
    """Yield the segments of each microbatch that has some, and their load."""
    microbatch_of_media = packs.microbatches[inputs.media_packs]
    for microbatch in np.unique(microbatch_of_media).tolist():
        items = np.flatnonzero(microbatch_of_media == microbatch)
        yield items, _media_load(inputs, packs, items)


def choose_exchange(
    inputs: StepInputs, maker: IntArray, owner: IntArray, rows: IntArray
) -> tuple[ExchangeKind, float]:
    """Return how these rows travel and the whole ticks that it takes; see ``ExchangePricer.choose``."""
    kind, seconds = inputs.pricer.choose(maker, owner, rows)
    return kind, float(round(seconds * TICKS_PER_S))


def _num_bytes(segments: Sequence[Segment], cost_model: CostModel | None) -> FloatArray:
    if cost_model is None:
        return np.zeros(len(segments))
    return np.asarray([cost_model.media_bytes(segment) for segment in segments], dtype=np.float64)


def _share_table(segments: Sequence[Segment], cost_model: CostModel, *, with_bytes: bool) -> ShareTable:
    """Prices remembered: the same segment is asked for by every placement that is tried."""

    @functools.cache
    def shares(item: int, degree: int) -> Shares | None:
        segment = segments[item]
        split = cost_model.split(segment, degree)
        if split is None:
            return None
        num_bytes = [cost_model.media_bytes(segment, rows) if with_bytes else 0 for rows in split.shares]
        return Shares(
            rows=np.asarray(split.shares, dtype=np.int64),
            costs=_ticks(split.costs),
            num_bytes=np.asarray(num_bytes, dtype=np.float64),
            joined=split.joined,
        )

    return shares


def _forced(inputs: StepInputs) -> IntArray:
    """Least degree of each segment; see ``forced_degrees``."""
    forced, overflows = forced_degrees(
        inputs.media[:, -1].tolist(),
        inputs.media_bytes,
        shares=inputs.shares,
        degrees=sorted(inputs.subgroups),
        min_rows=inputs.lssp.min_rows,
        max_bytes=inputs.max_bytes,
    )
    for overflow in overflows:
        pack, number, segment, _, num_rows = inputs.media[overflow.item].tolist()
        sample = inputs.packs[pack].samples[number]
        most = max(inputs.subgroups, default=1)
        raise ConfigError(
            f"the {sample.segments[segment].modality} of {num_rows} rows keeps "
            f"{overflow.num_bytes} bytes on a rank, shared by at most {most}, limit {inputs.max_bytes:.0f}",
            where=f"source {sample.id.source!r}, {sample.shard}, sample {sample.key}",
            fix="raise balance.encoder_memory_bytes, or balance.lssp.max_degree (kind = 'auto'), or leave "
            "out samples of this size (sources.N.where)",
        )
    return forced


def _ticks(seconds: Sequence[float]) -> FloatArray:
    return np.rint(np.asarray(seconds, dtype=np.float64) * TICKS_PER_S)


def _media_load(inputs: StepInputs, packs: PackPlacement, items: IntArray) -> MediaLoad:
    """The segments ``items`` (ascending) of one microbatch, renumbered from 0."""
    number = np.full(len(inputs.media), -1, dtype=np.int64)
    number[items] = np.arange(len(items))
    here = number[inputs.pieces.item] >= 0
    piece_item = inputs.pieces.item[here]
    replica = packs.replicas[inputs.media_packs]
    numbers = items.tolist()

    def shares(item: int, degree: int) -> Shares | None:
        return inputs.shares(numbers[item], degree)

    return MediaLoad(
        costs=inputs.media_costs[items],
        home=inputs.owners[replica[items], 0],
        piece_item=number[piece_item],
        piece_owner=inputs.owners[replica[piece_item], inputs.pieces.owner[here]],
        piece_rows=inputs.pieces.rows[here],
        num_members=len(inputs.ranks),
        num_bytes=inputs.media_bytes[items],
        max_bytes=inputs.max_bytes,
        subgroups=inputs.subgroups,
        shares=shares,
    )

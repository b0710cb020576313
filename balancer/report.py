"""A plan as rows for tables: what runs where, how full it is, who encodes what, and how rows travel.

Plain data: whoever prints them (the CLI, the HTML report) decides how they look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from balancer.cost import CostModel
from balancer.exchange import ExchangePricer
from balancer.layout import SequenceLayout
from balancer.nodes import group_nodes
from balancer.reshard import Routes, build_routes
from omni_pipeline.core.plan import ExchangeKind, MediaPlacement, Pack, StepPlan


@dataclass(frozen=True, slots=True)
class PackRow:
    """One (replica, microbatch) of a plan.

    Args:
        replica: Of the run.
        microbatch: Of the step.
        lane: Of the pack; -1 where nothing runs.
        number: Of the pack in its lane; -1 where nothing runs.
        num_samples: Samples in the pack.
        num_tokens: Sequence positions that hold a token of a sample.
        num_positions: Sequence positions taken, padding included.
        num_labels: Positions with a label.
        fill: ``num_tokens`` over the sequence length, 0 to 1.
        num_media: Media segments in the pack.
        llm_s: Modelled work of the pack in the LLM, seconds of one rank.
        encoder_s: Modelled work of its media, seconds of one rank.
        samples: ``source/key (shard)`` of each sample, in order.
    """

    replica: int
    microbatch: int
    lane: int
    number: int
    num_samples: int
    num_tokens: int
    num_positions: int
    num_labels: int
    fill: float
    num_media: int
    llm_s: float
    encoder_s: float
    samples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankRow:
    """What one rank encodes in a step.

    Args:
        rank: Of the run.
        before_s: Modelled encoding without balancing, seconds over all microbatches.
        after_s: The same under the plan.
        num_media_before: Media segments without balancing.
        num_media_after: Media segments under the plan, those that it shares included.
        num_long: Of these, segments that it shares with others.
        num_rows_after: Embedding rows that it makes under the plan.
    """

    rank: int
    before_s: float
    after_s: float
    num_media_before: int
    num_media_after: int
    num_long: int
    num_rows_after: int


@dataclass(frozen=True, slots=True)
class ExchangeRow:
    """How the rows of one microbatch travel in a group.

    Args:
        microbatch: Of the step.
        kind: Of the exchange.
        num_rows: Embedding rows of all ranks.
        num_moved: Rows whose owner did not make them.
        node_bytes: Bytes of moved rows and their gradients that stay inside a node, each row counted once; a
            summed buffer and two hops carry more.
        network_bytes: Likewise, between nodes.
        exchange_s: Modelled time, there and back, seconds.
    """

    microbatch: int
    kind: ExchangeKind
    num_rows: int
    num_moved: int
    node_bytes: int
    network_bytes: int
    exchange_s: float


def pack_rows(plan: StepPlan, *, cost_model: CostModel, seq_len: int) -> list[PackRow]:
    """Return one row per (replica, microbatch) of the group, by microbatch then replica, empty ones too.

    Args:
        plan: What to show.
        cost_model: Prices packs and media.
        seq_len: Positions of a full sequence, for ``fill``.
    """
    rows = []
    for microbatch in range(plan.num_microbatches):
        for replica in plan.replicas:
            index = plan.pack_at(replica, microbatch)
            pack = Pack(-1, -1, ()) if index is None else plan.packs[index]
            rows.append(_pack_row(pack, replica, microbatch, cost_model, seq_len))
    return rows


def rank_rows(plan: StepPlan, unbalanced: StepPlan, *, cost_model: CostModel) -> list[RankRow]:
    """Return one row per rank of the group, ascending.

    Args:
        plan: What to show.
        unbalanced: The same step without balancing; see ``GroupPlanner.unbalanced``.
        cost_model: Prices the media.
    """
    before, after = _media_by_rank(unbalanced), _media_by_rank(plan)
    return [
        RankRow(
            rank=rank,
            before_s=_encoding_s(unbalanced, before[rank], rank, cost_model),
            after_s=_encoding_s(plan, after[rank], rank, cost_model),
            num_media_before=len(before[rank]),
            num_media_after=len(after[rank]),
            num_long=sum(item.is_long for item in after[rank]),
            num_rows_after=sum(len(item.rows_of(rank)) for item in after[rank]),
        )
        for rank in plan.ranks
    ]


def exchange_rows(
    plan: StepPlan, *, layout: SequenceLayout, encoders: Sequence[str], cost_model: CostModel
) -> list[ExchangeRow]:
    """Return one row per microbatch.

    Args:
        plan: What to show.
        layout: Who owns which positions.
        encoders: All encoders of the run.
        cost_model: Prices the exchanges.
    """
    pricer = ExchangePricer(cost_model, group_nodes(layout.topology, plan.group))
    return [
        _exchange_row(
            build_routes(plan, microbatch=microbatch, layout=layout, encoders=encoders),
            microbatch=microbatch,
            kind=kind,
            pricer=pricer,
        )
        for microbatch, kind in enumerate(plan.exchanges)
    ]


def moved_rows_fraction(exchanges: Sequence[ExchangeRow]) -> float:
    """Return the share of embedding rows that change rank, 0 to 1."""
    return sum(row.num_moved for row in exchanges) / max(1, sum(row.num_rows for row in exchanges))


def _exchange_row(
    routes: Routes, *, microbatch: int, kind: ExchangeKind, pricer: ExchangePricer
) -> ExchangeRow:
    node, bytes_per_row = routes.nodes.node, pricer.cost_model.bytes_per_row
    moved = int(routes.rows[routes.maker != routes.owner].sum())
    between = int(routes.rows[node[routes.maker] != node[routes.owner]].sum())
    return ExchangeRow(
        microbatch=microbatch,
        kind=kind,
        num_rows=int(routes.rows.sum()),
        num_moved=moved,
        node_bytes=(moved - between) * bytes_per_row,
        network_bytes=between * bytes_per_row,
        exchange_s=pricer.seconds(kind, routes.maker, routes.owner, routes.rows),
    )


def _pack_row(pack: Pack, replica: int, microbatch: int, cost_model: CostModel, seq_len: int) -> PackRow:
    media = [segment for sample in pack.samples for segment in sample.segments if segment.is_media]
    return PackRow(
        replica=replica,
        microbatch=microbatch,
        lane=pack.lane,
        number=pack.number,
        num_samples=len(pack.samples),
        num_tokens=pack.num_tokens,
        num_positions=pack.num_positions,
        num_labels=pack.num_labels,
        fill=pack.num_tokens / seq_len,
        num_media=len(media),
        llm_s=cost_model.pack_cost(pack),
        encoder_s=sum(cost_model.media_cost(segment) for segment in media),
        samples=tuple(f"{sample.id.source}/{sample.key} ({sample.shard})" for sample in pack.samples),
    )


def _media_by_rank(plan: StepPlan) -> dict[int, list[MediaPlacement]]:
    found: dict[int, list[MediaPlacement]] = {rank: [] for rank in plan.ranks}
    for item in plan.media:
        for rank in item.ranks:
            found[rank].append(item)
    return found


def _encoding_s(plan: StepPlan, items: list[MediaPlacement], rank: int, cost_model: CostModel) -> float:
    """Modelled seconds of ``rank`` for these segments, of which it has at least a share each."""
    total = 0.0
    for item in items:
        segment = plan.packs[item.pack].samples[item.sample].segments[item.segment]
        split = cost_model.split(segment, len(item.ranks)) if item.is_long else None
        total += split.costs[item.ranks.index(rank)] if split else cost_model.media_cost(segment)
    return total

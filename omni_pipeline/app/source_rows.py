"""How far each source is: rows left out, its share, the epoch that it is in."""

from __future__ import annotations

from dataclasses import dataclass

from loaders.mixture import Moment
from loaders.order import Order
from omni_pipeline.app.wire import Stream


@dataclass(frozen=True)
class SourceRow:
    """One source as the lanes of an order stand in it.

    Args:
        name: Of the source.
        num_rows: Rows of its indexes, usable or not.
        left_out: Rows passed by since the state that the order was followed from, by reason.
        share: Its share of the mixture, before sources that are used up are taken out.
        epoch: Epochs that these lanes have drawn, on average.
    """

    name: str
    num_rows: int
    left_out: dict[str, int]
    share: float
    epoch: float


def source_rows(stream: Stream, order: Order, *, step: int) -> list[SourceRow]:
    """Return one row per source, by name, for ``order`` after it has given ``step``; reads no index."""
    lanes = order.state_dict()
    tokens = sum(lane["tokens"] for lane in lanes.values()) * stream.order.lanes // max(1, len(lanes))
    shares = stream.mixture.shares(Moment(step, tokens))
    rows = []
    for source, share in zip(sorted(stream.sources, key=lambda source: source.name), shares, strict=True):
        lane_order = order.lane_order(source.name)
        drawn = sum(lane["sources"][source.name]["position"] for lane in lanes.values())
        owned = sum(lane_order.run_length(int(lane)) for lane in lanes) / lane_order.epochs_per_round
        left_out = {reason: count for (name, reason), count in order.left_out.items() if name == source.name}
        rows.append(SourceRow(source.name, sum(source.shard_sizes), left_out, share, drawn / max(owned, 1)))
    return rows

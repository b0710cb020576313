"""How far each source is: rows left out, its share, the epoch that it is in."""

from __future__ import annotations

from dataclasses import dataclass

from loaders.filters import count_left_out
from loaders.mixture import Moment
from loaders.order import Order
from loaders.source import COUNTED_ROWS
from omni_pipeline.app.wire import Stream


@dataclass(frozen=True)
class SourceRow:
    """One source as the lanes of an order stand in it.

    Args:
        name: Of the source.
        num_rows: Rows of its indexes, usable or not.
        num_counted: The first of them, of which ``left_out`` is counted.
        left_out: Rows that are never drawn, by reason ("where", "deny", "unusable").
        share: Its share of the mixture, before sources that are used up are taken out.
        epoch: Epochs that these lanes have drawn, on average.
    """

    name: str
    num_rows: int
    num_counted: int
    left_out: dict[str, int]
    share: float
    epoch: float


def source_rows(stream: Stream, order: Order, *, step: int) -> list[SourceRow]:
    """Return one row per source, by name, for ``order`` after it has given ``step``."""
    lanes = order.state_dict()
    tokens = sum(lane["tokens"] for lane in lanes.values()) * stream.order.lanes // max(1, len(lanes))
    shares = stream.mixture.shares(Moment(step, tokens))
    rows = []
    for source, share in zip(sorted(stream.sources, key=lambda source: source.name), shares, strict=True):
        lane_order = order.lane_order(source.name)
        drawn = sum(lane["sources"][source.name]["position"] for lane in lanes.values())
        owned = sum(lane_order.run_length(int(lane)) for lane in lanes) / lane_order.epochs_per_round
        rows.append(
            SourceRow(
                name=source.name,
                num_rows=len(source),
                num_counted=min(len(source), COUNTED_ROWS),
                left_out=dict(count_left_out(source, max_rows=COUNTED_ROWS)),
                share=share,
                epoch=drawn / max(owned, 1),
            )
        )
    return rows

"""How data that ends was used up: samples seen, samples left, packs that stayed empty.

All from the metrics of the run, so that it holds for a run of several starts, and after the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from omni_pipeline.app.run_dir import Event
from omni_pipeline.app.sinks import MetricValues

DATA_ENDED = "the data ended"
"""Begin of the event that tells it."""

_SEEN, _LEFT = "loader/samples/", "loader/left/"


@dataclass(frozen=True)
class DataEnd:
    """How far the sources that end are used up; each epoch counts its samples again.

    Args:
        seen: Samples in the packs of the steps done, by source.
        left: Samples in no pack of these, by source.
        num_empty_packs: Packs of these steps that had no samples left to hold.
        num_empty_positions: The positions that they would have had.
    """

    seen: Mapping[str, int]
    left: Mapping[str, int]
    num_empty_packs: int
    num_empty_positions: int

    @property
    def padding(self) -> str:
        """The empty packs in words."""
        packs = "pack" if self.num_empty_packs == 1 else "packs"
        return f"{self.num_empty_packs:,} {packs} ({self.num_empty_positions:,} positions) stayed empty"

    def __str__(self) -> str:
        sources = "; ".join(
            f"{name} {self.seen[name]:,} seen, {left:,} left" for name, left in self.left.items()
        )
        return f"samples of {sources}; {self.padding}"


def data_end(metrics: Mapping[str, MetricValues]) -> DataEnd | None:
    """Return how far the data is used up after the last step; None if no source ends.

    Args:
        metrics: By name (steps, values), superseded numbers left out.
    """
    left = {
        name.removeprefix(_LEFT): int(values[-1])
        for name, (_, values) in metrics.items()
        if name.startswith(_LEFT)
    }
    if not left:
        return None
    return DataEnd(
        seen={name: _total(metrics, _SEEN + name) for name in left},
        left=left,
        num_empty_packs=_total(metrics, "loader/empty_packs"),
        num_empty_positions=_total(metrics, "loader/empty_positions"),
    )


def has_ended(events: Iterable[Event], num_steps: int) -> bool:
    """Return whether the data of a run that trained ``num_steps`` ended there, by its events."""
    return any(event.step == num_steps and DATA_ENDED in event.text for event in events)


def _total(metrics: Mapping[str, MetricValues], name: str) -> int:
    return int(np.nansum(metrics[name][1])) if name in metrics else 0

"""Small orders over sources in memory, and what their steps hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from loaders.fitting import UNUSABLE, PackSizes
from loaders.order import Order, OrderConfig, SampleSource
from loaders.weight import Weight
from omni_pipeline.core.plan import Pack
from omni_pipeline.core.sample import Modality, SampleId
from tests.support.strategies import MemorySource, media_segment, text_segment, text_source


def config(**changes: Any) -> OrderConfig:
    """Return settings with small budgets: 4 lanes, 2 packs of 400 tokens each."""
    values: dict[str, Any] = {
        "lanes": 4, "packs_per_step": 8, "seq_len": 400, "look_ahead": 5, "shuffle_block": 4,
        "max_patches": 500, "max_mel_frames": 900, "oversize": "cut",
    }  # fmt: skip
    return OrderConfig(**(values | changes))


def build(
    settings_: OrderConfig,
    sources: Sequence[SampleSource],
    *,
    lanes: Iterable[int] | None = None,
    weights: dict[str, Weight] | None = None,
) -> Order:
    """Return an order of ``lanes`` (default: all); weights are 1, 2, 3... unless given."""
    return Order(
        settings_,
        sources=sources,
        weights=weights or {source.name: 1.0 + index for index, source in enumerate(sources)},
        seed=3,
        lanes=range(settings_.lanes) if lanes is None else lanes,
    )


def mixed_sources() -> list[MemorySource]:
    """Return text, images, videos and talks, some too large to fit whole."""
    picture = [media_segment(Modality.IMAGE, (1, 8, 8)), text_segment(30)]
    clip = [media_segment(Modality.VIDEO, (4, 10, 10)), text_segment(7)]
    talk = [text_segment(5, loss=False), media_segment(Modality.AUDIO, (300, 1, 1)), text_segment(20)]
    return [
        text_source("text", [40, 0, 13], [10, 300, 55, 120, 1000, 33]),
        MemorySource("images", [9, 30], [picture]),
        MemorySource("video", [3], [clip, picture]),
        MemorySource("talks", [25], [talk]),
    ]


def ids(packs: Iterable[Pack]) -> list[SampleId]:
    """Return the samples of ``packs``, in order."""
    return [sample.id for pack in packs for sample in pack.samples]


def ends(order: Order, *, max_steps: int = 500) -> list[list[Pack]]:
    """Return all steps until the order is exhausted."""
    steps: list[list[Pack]] = []
    while not order.exhausted:
        steps.append(order.next_step(len(steps)))
        assert len(steps) < max_steps
    return steps


@dataclass(frozen=True)
class PartlyUsableSource(MemorySource):
    """Rows whose ordinal is 1, 2 or 3 modulo 5 are filtered, denied or unusable."""

    def sizes(self, ordinals: npt.NDArray[np.int64]) -> PackSizes:
        status = np.where(ordinals % 5 <= 3, ordinals % 5, 0).astype(np.int8)
        return replace(super().sizes(ordinals), status=status)

    def problem(self, ordinal: int) -> str:
        assert ordinal % 5 == UNUSABLE
        return f"row {ordinal} is bad"


@dataclass(frozen=True)
class StatusSource(PartlyUsableSource):
    """Rows of the given status."""

    status: npt.NDArray[np.int8] = field(default_factory=lambda: np.zeros(0, dtype=np.int8))

    def sizes(self, ordinals: npt.NDArray[np.int64]) -> PackSizes:
        return replace(super().sizes(ordinals), status=self.status[ordinals])


@dataclass(frozen=True)
class CountingSource(MemorySource):
    """Counts the rows that are looked at."""

    looked_at: list[int] = field(default_factory=list)

    def sizes(self, ordinals: npt.NDArray[np.int64]) -> PackSizes:
        self.looked_at.append(len(ordinals))
        return super().sizes(ordinals)

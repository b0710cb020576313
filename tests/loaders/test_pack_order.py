"""Of data that ends, every sample is packed, left out or left over, after every step and on any groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.fitting import PackSizes
from loaders.order import Order, OrderConfig
from loaders.pack_order import count_step
from tests.support.strategies import MemorySource, shard_sizes, text_segment


@dataclass(frozen=True)
class MarkedSource(MemorySource):
    """Its rows are usable, filtered, denied and unusable in turn, beginning with ``phase``; 0 is usable."""

    phase: int = 0

    def sizes(self, ordinals: npt.NDArray[np.int64]) -> PackSizes:
        status = np.where(ordinals == 0, 0, (ordinals + self.phase) % 4).astype(np.int8)
        return replace(super().sizes(ordinals), status=status)

    def problem(self, ordinal: int) -> str:
        return f"row {ordinal} is bad"


@st.composite
def marked_sources(draw: st.DrawFn) -> list[MarkedSource]:
    lengths = st.lists(st.sampled_from([3, 8, 20, 90]), max_size=6)  # 90 fits no pack, the first row does
    return [
        MarkedSource(
            name,
            draw(shard_sizes(max_shards=4, max_size=12)),
            [[text_segment(count)] for count in [5, *draw(lengths)]],
            phase=draw(st.integers(0, 3)),
        )
        for name in ("one", "two")
    ]


@settings(deadline=None, max_examples=30)
@given(sources=marked_sources(), num_groups=st.integers(1, 4), epochs=st.integers(1, 3))
def test_nothing_is_lost_and_nothing_counted_twice(
    sources: list[MarkedSource], num_groups: int, epochs: int
) -> None:
    config = OrderConfig(lanes=4, packs_per_step=8, seq_len=40, look_ahead=3, shuffle_block=4, epochs=epochs)
    groups = [
        Order(
            config,
            sources=sources,
            weights={"one": 2.0, "two": 1.0},
            seed=3,
            lanes=range(group, 4, num_groups),
        )
        for group in range(num_groups)
    ]
    expected = {source.name: epochs * sum(source.shard_sizes) for source in sources}
    before = [Counter[tuple[str, str]]() for _ in groups]
    packed, passed = Counter[str](), Counter[str]()
    for step in range(1000):
        left = Counter[str]()
        for group, order in enumerate(groups):
            packed.update(sample.id.source for pack in order.next_step(step) for sample in pack.samples)
            counts, before[group] = count_step(order, left_out_before=before[group])
            passed.update(counts.dropped)
            passed.update(counts.filtered)
            left.update(counts.left)
        assert {name: packed[name] + passed[name] + left[name] for name in expected} == expected
        if all(order.exhausted for order in groups):
            break
    assert not any(left.values())
    usable = {source.name: epochs * _num_usable(source) for source in sources}
    assert {name: packed[name] for name in usable} == usable


def _num_usable(source: MarkedSource) -> int:
    sizes = source.sizes(np.arange(sum(source.shard_sizes)))
    return int(((sizes.status == 0) & (sizes.tokens <= 40)).sum())


def test_reasons_are_told_apart_and_a_source_that_ends_is_told_with_the_shares_that_remain() -> None:
    sources = [MarkedSource("one", [8], [[text_segment(5)]]), MemorySource("two", [40], [[text_segment(5)]])]
    config = OrderConfig(lanes=1, packs_per_step=1, seq_len=100, look_ahead=1, epochs=1)
    order = Order(config, sources=sources, weights={"one": 3.0, "two": 1.0}, seed=3, lanes=[0])
    order.next_step(0)
    counts, before = count_step(order, left_out_before=Counter())
    assert (counts.filtered, counts.dropped) == ({"one": 4}, {"one": 2})
    assert counts.used_up == {"one": pytest.approx({"one": 0.0, "two": 1.0})}
    order.next_step(1)
    counts, _ = count_step(order, left_out_before=before)
    assert (counts.filtered, counts.dropped, counts.used_up) == ({}, {}, {})

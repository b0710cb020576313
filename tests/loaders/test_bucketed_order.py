"""An order in buckets: the same packs however lanes are spread, exact resume, every sample once, budgets."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.bucketing_config import BucketingConfig
from loaders.fitting import media_units
from loaders.order import Order, OrderConfig, merge_states
from loaders.weight import Weight
from omni_pipeline.core.errors import ConfigError
from omni_pipeline.core.plan import Pack
from tests.support.resume import assert_resumes_anywhere
from tests.support.strategies import MemorySource, source_sets, text_source

FAST = settings(deadline=None, max_examples=15)
TABLES: dict[str, dict[str, Any]] = {
    "boundaries": {"boundaries": [20, 60, 200]},
    "quantiles": {"quantiles": 5},
    "jointly": {"quantiles": 3, "patch_quantiles": 2},
}
tables = st.sampled_from(list(TABLES.values()))


def build(
    sources: Sequence[MemorySource],
    table: dict[str, Any],
    *,
    lanes: Iterable[int] = range(4),
    weights: dict[str, Weight] | None = None,
    **changes: Any,
) -> Order:
    values: dict[str, Any] = {
        "lanes": 4, "packs_per_step": 8, "seq_len": 400, "look_ahead": 5, "shuffle_block": 4,
        "max_patches": 500, "max_mel_frames": 900, "max_samples": 6, "oversize": "cut",
    }  # fmt: skip
    return Order(
        OrderConfig(bucketing=BucketingConfig(**table), **(values | changes)),
        sources=sources,
        weights=weights or {source.name: 1.0 + index for index, source in enumerate(sources)},
        seed=3,
        lanes=lanes,
    )


def steps_until_the_end(order: Order) -> list[list[Pack]]:
    steps: list[list[Pack]] = []
    while not order.exhausted:
        steps.append(order.next_step(len(steps)))
        assert len(steps) < 500
    return steps


def can_be_drawn(sources: Sequence[MemorySource], table: dict[str, Any]) -> bool:
    try:
        build(sources, table)
    except ConfigError:
        return False
    return True


@FAST
@given(sources=source_sets(), table=tables)
def test_every_sample_comes_once_in_each_epoch_or_is_dropped_and_no_budget_is_broken(
    sources: list[MemorySource], table: dict[str, Any]
) -> None:
    if not can_be_drawn(sources, table):
        return
    order = build(sources, table, epochs=2)
    packs = [pack for step in steps_until_the_end(order) for pack in step]
    dropped = {item.id for item in order.drain_dropped()}
    expected: Counter[Any] = Counter()
    for source in sources:
        for ordinal in range(sum(source.shard_sizes)):
            identity = source.sample(ordinal).id
            expected[identity] = 0 if identity in dropped else 2
    found = Counter(sample.id for pack in packs for sample in pack.samples)
    assert found == +expected
    for pack in packs:
        assert all(sample.num_tokens <= pack.padded_len for sample in pack.samples)
        assert pack.num_positions == len(pack.samples) * pack.padded_len <= 400
        assert sum(media_units(sample)[0] for sample in pack.samples) <= 500
        assert sum(media_units(sample)[1] for sample in pack.samples) <= 900
        assert len(pack.samples) <= 6


@FAST
@given(sources=source_sets(), table=tables, groups=st.integers(1, 4), stop=st.integers(0, 3))
def test_lanes_may_be_spread_anew_at_any_step_and_the_packs_stay_the_same(
    sources: list[MemorySource], table: dict[str, Any], groups: int, stop: int
) -> None:
    if not can_be_drawn(sources, table):
        return
    whole = build(sources, table, epochs=3)
    halves = [build(sources, table, lanes=lanes, epochs=3) for lanes in ([0, 3], [1, 2])]
    for step in range(stop):
        whole.next_step(step)
        for half in halves:
            half.next_step(step)
    state = json.loads(json.dumps(merge_states([half.state_dict() for half in halves])))
    assert state == whole.state_dict()
    parts = [build(sources, table, lanes=range(group, 4, groups), epochs=3) for group in range(groups)]
    for part in parts:
        part.load_state_dict(state)
    for step in range(stop, stop + 2):
        packs = [pack for part in parts for pack in part.next_step(step)]
        assert sorted(packs, key=lambda pack: (pack.lane, pack.number)) == whole.next_step(step)


class Steps:
    """The packs of an order, step by step."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.step = 0

    def __iter__(self) -> Iterator[list[Pack]]:
        while True:
            self.step += 1
            yield self.order.next_step(self.step - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "lanes": self.order.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.order.load_state_dict(state["lanes"])


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_run_resumed_at_any_step_gives_the_same_rest(table: dict[str, Any]) -> None:
    sources = [
        text_source("text", [40, 0, 13], [10, 300, 55, 120, 1000, 33]),
        text_source("notes", [9, 30], [4, 7, 90]),
    ]
    assert_resumes_anywhere(lambda: Steps(build(sources, table)), num_items=6)


def test_a_source_that_comes_later_counts_in_the_quantiles_from_the_start() -> None:
    sources = [text_source("long", [60], [300]), text_source("short", [60], [10])]
    later: dict[str, Weight] = {"short": 1.0, "long": [[0, 0.0], [100, 1.0]]}
    order = build(sources, {"quantiles": 2}, weights=later)
    lengths = {pack.padded_len for step in (0, 200) for pack in order.next_step(step)}
    assert lengths == {10, 300}

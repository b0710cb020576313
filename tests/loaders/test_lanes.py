"""Lanes: position to sample, whole and different in every round, at any position without replay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.lanes import LaneOrder
from omni_pipeline.core.errors import ConfigError
from tests.support.strategies import shard_sizes

FAST = settings(deadline=None, max_examples=40)


def build(sizes: list[int], **changes: Any) -> LaneOrder:
    arguments: dict[str, Any] = {"name": "laion", "lanes": 4, "seed": 7, "shuffle_block": 8} | changes
    return LaneOrder(sizes, **arguments)


def round_of(order: LaneOrder, lane: int, round_index: int) -> list[int]:
    length = order.run_length(lane)
    return [order.ordinal(lane, round_index * length + offset) for offset in range(length)]


@FAST
@given(
    sizes=shard_sizes(),
    lanes=st.integers(1, 12),
    block=st.integers(1, 9),
    seed=st.integers(0, 9),
    round_index=st.sampled_from([0, 1, 5, 10**9]),
)
def test_every_round_gives_every_sample_once_per_epoch_of_the_round(
    sizes: list[int], lanes: int, block: int, seed: int, round_index: int
) -> None:
    order = build(sizes, lanes=lanes, shuffle_block=block, seed=seed)
    seen = Counter(ordinal for lane in range(lanes) for ordinal in round_of(order, lane, round_index))
    assert seen == dict.fromkeys(range(sum(sizes)), order.epochs_per_round)
    assert order.epochs_per_round == -(-lanes // sum(sizes))


@FAST
@given(sizes=shard_sizes(), lanes=st.integers(1, 12), epochs=st.integers(1, 7), block=st.integers(1, 9))
def test_finite_epochs_give_every_sample_exactly_that_often(
    sizes: list[int], lanes: int, epochs: int, block: int
) -> None:
    order = build(sizes, lanes=lanes, epochs=epochs, shuffle_block=block)
    lengths = [order.num_positions(lane) for lane in range(lanes)]
    seen = Counter(
        order.ordinal(lane, position)
        for lane, length in enumerate(lengths)
        for position in range(length or 0)
    )
    assert seen == dict.fromkeys(range(sum(sizes)), epochs)
    for lane, length in enumerate(lengths):
        with pytest.raises(ValueError, match="no position"):
            order.ordinal(lane, length or 0)


@FAST
@given(sizes=shard_sizes(), lanes=st.integers(1, 12), positions=st.lists(st.integers(0, 200), max_size=20))
def test_a_sample_depends_on_its_position_only_not_on_what_was_read_before(
    sizes: list[int], lanes: int, positions: list[int]
) -> None:
    reader = build(sizes, lanes=lanes)
    for position in positions:
        assert reader.ordinal(lanes - 1, position) == build(sizes, lanes=lanes).ordinal(lanes - 1, position)


@FAST
@given(position=st.integers(0, 10**12))
def test_block_and_ordinal_agree_at_any_position(position: int) -> None:
    order = build([50, 0, 70, 9], lanes=3, shuffle_block=16)
    first, ordinals = order.block(1, position)
    assert first <= position < first + len(ordinals)
    assert [order.ordinal(1, first + offset) for offset in range(len(ordinals))] == ordinals.tolist()


@FAST
@given(
    sizes=shard_sizes(),
    lanes=st.integers(1, 40),
    block=st.integers(1, 9),
    first_epoch=st.sampled_from([0, 1, 10**9]),
)
def test_the_place_of_a_sample_is_the_inverse_of_the_sample_of_a_place(
    sizes: list[int], lanes: int, block: int, first_epoch: int
) -> None:
    order = build(sizes, lanes=lanes, shuffle_block=block)
    for epoch in range(first_epoch, first_epoch + 2 * order.epochs_per_round):
        places = [order.positions_of(ordinal, epoch=epoch) for ordinal in range(order.num_rows)]
        assert [order.ordinal(lane, position) for lane, position in places] == list(range(sum(sizes)))
        for lane, position in places:
            assert position // order.run_length(lane) == epoch // order.epochs_per_round


@FAST
@given(sizes=shard_sizes(), lanes=st.integers(1, 40), epochs=st.integers(1, 7), block=st.integers(1, 9))
def test_the_places_of_all_samples_in_all_epochs_are_all_positions_of_all_lanes(
    sizes: list[int], lanes: int, epochs: int, block: int
) -> None:
    order = build(sizes, lanes=lanes, epochs=epochs, shuffle_block=block)
    places = [
        order.positions_of(ordinal, epoch=epoch)
        for ordinal in range(order.num_rows)
        for epoch in range(epochs)
    ]
    lengths = [order.num_positions(lane) or 0 for lane in range(lanes)]
    assert sorted(places) == [(lane, place) for lane in range(lanes) for place in range(lengths[lane])]
    with pytest.raises(ValueError, match=f"has no epoch {epochs}"):
        order.positions_of(0, epoch=epochs)
    with pytest.raises(ValueError, match=f"has no row {order.num_rows}: it has {order.num_rows}"):
        order.positions_of(order.num_rows, epoch=0)


def test_lanes_of_one_single_shard_get_other_samples_in_other_epochs() -> None:
    order = build([400], lanes=4)
    assert set(round_of(order, 0, 0)) != set(round_of(order, 0, 1))


def test_a_lane_of_a_tiny_source_does_not_see_the_same_sample_for_ever() -> None:
    order = build([3], lanes=64)
    for lane in (0, 31, 63):
        assert {order.ordinal(lane, position) for position in range(40)} == {0, 1, 2}


def test_epochs_seeds_and_sources_have_different_orders() -> None:
    first = round_of(build([100] * 4), 0, 0)
    assert first != round_of(build([100] * 4), 0, 1)
    assert first != round_of(build([100] * 4, seed=8), 0, 0)
    assert first != round_of(build([100] * 4, name="talks"), 0, 0)
    assert first == round_of(build([100] * 4), 0, 0)


@FAST
@given(
    sizes=st.lists(st.integers(3, 30), min_size=1, max_size=20),
    lanes=st.integers(1, 3),
    block=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_a_block_opens_no_more_shards_than_the_stated_bound(
    sizes: list[int], lanes: int, block: int, seed: int
) -> None:
    order = build(sizes, lanes=lanes, shuffle_block=block, seed=seed)
    ends = np.cumsum(sizes)
    position = 0
    while position < order.run_length(0):
        first, ordinals = order.block(0, position)
        shards = np.unique(np.searchsorted(ends, ordinals, side="right"))
        assert len(shards) <= -(-(block - 1) // min(sizes)) + 1
        position = first + len(ordinals)


def test_a_block_is_shuffled() -> None:
    _, ordinals = build([1000], lanes=1, shuffle_block=256).block(0, 0)
    assert len(ordinals) == 256
    assert sorted(ordinals.tolist()) != ordinals.tolist()


def test_every_epoch_permutes_the_shards() -> None:
    order = build([1] * 40, lanes=1, shuffle_block=1)
    first, second = round_of(order, 0, 0), round_of(order, 0, 1)
    start = second.index(first[0])
    assert first != second[start:] + second[:start], "more than a rotation"
    assert first != [(first[0] + step) % 40 for step in range(40)]


def test_every_epoch_and_lane_shuffles_its_blocks_in_another_way() -> None:
    order = build([300], lanes=2, shuffle_block=150)
    patterns = {
        tuple((ordinal - found[0]) % 300 for ordinal in found)
        for found in (round_of(order, lane, epoch) for lane in range(2) for epoch in range(3))
    }
    assert len(patterns) == 6


def test_a_far_position_costs_no_more_than_a_near_one() -> None:
    order = build([10_000] * 50, lanes=64)
    calls = 0
    original = order._epoch

    def counted(epoch: int) -> Any:
        nonlocal calls
        calls += 1
        return original(epoch)

    order._epoch = counted  # type: ignore[method-assign]
    order.ordinal(5, 10**12)
    assert calls == 2, "for the turn of the lane and for the rows"
    assert len(order._cache) == 1


def test_a_source_without_samples_is_refused_in_full_words() -> None:
    with pytest.raises(ConfigError) as caught:
        build([0, 0])
    assert str(caught.value) == (
        "source 'laion' has no samples\n"
        "  where: source 'laion', 2 shards\n"
        "  fix:   remove the source, or widen its shard pattern"
    )

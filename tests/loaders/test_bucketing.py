"""Bucketing: one bucket a pack, budgets kept at full padding, nothing lost or twice, nothing starves."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from loaders.bucketing import BucketBuffer, Buckets
from loaders.bucketing_config import BucketingConfig
from loaders.order_config import OrderConfig
from loaders.packing import Budgets, Entry

FAST = settings(deadline=None, max_examples=80)
BUDGETS = Budgets(tokens=100, patches=60, mel_frames=70, samples=9)
BY_LENGTH = Buckets((8, 20, 50, 100))
JOINT = Buckets((8, 20, 50, 100), (0, 10, 60))

Sizes = tuple[int, int, int]


def entries(sizes: Sequence[Sizes]) -> list[Entry]:
    return [Entry(0, place, place, *size) for place, size in enumerate(sizes)]


def texts(*tokens: int) -> list[Entry]:
    return entries([(count, 0, 0) for count in tokens])


def feed(found: Sequence[Entry]) -> Callable[[], Entry | None]:
    rest = iter(found)
    return lambda: next(rest, None)


def all_packs(
    found: Sequence[Entry], buckets: Buckets = BY_LENGTH, *, look_ahead: int = 8, budgets: Budgets = BUDGETS
) -> list[list[Entry]]:
    buffer = BucketBuffer(buckets, budgets, look_ahead=look_ahead)
    draw = feed(found)
    packs = []
    while pack := buffer.next_pack(draw):
        packs.append(pack)
    return packs


def lengths(packs: list[list[Entry]]) -> list[list[int]]:
    return [[entry.tokens for entry in pack] for pack in packs]


many_sizes = st.lists(
    st.tuples(st.integers(1, 100), st.sampled_from([0, 0, 4, 10, 11, 60]), st.sampled_from([0, 30, 70])),
    max_size=80,
)
any_buckets = st.sampled_from([BY_LENGTH, JOINT, Buckets((100,))])
look_aheads = st.integers(1, 12)


@FAST
@given(sizes=many_sizes, buckets=any_buckets, look_ahead=look_aheads)
def test_every_sample_is_in_one_pack_of_its_bucket_and_padding_breaks_no_budget(
    sizes: list[Sizes], buckets: Buckets, look_ahead: int
) -> None:
    found = entries(sizes)
    packs = all_packs(found, buckets, look_ahead=look_ahead)
    assert sorted(entry for pack in packs for entry in pack) == found
    for pack in packs:
        assert len({buckets.of(entry) for entry in pack}) == 1
        padded_len = buckets.padded_len(pack)
        assert padded_len in buckets.boundaries
        assert max(entry.tokens for entry in pack) <= padded_len
        assert padded_len * len(pack) <= BUDGETS.tokens
        assert len(pack) <= BUDGETS.samples
        assert sum(entry.patches for entry in pack) <= BUDGETS.patches
        assert sum(entry.mel_frames for entry in pack) <= BUDGETS.mel_frames
        if buckets.patch_boundaries:
            most_patches = buckets.patch_boundaries[buckets.of(pack[0])[1]]
            assert max(entry.patches for entry in pack) <= most_patches
            assert most_patches * len(pack) <= BUDGETS.patches


@FAST
@given(sizes=many_sizes, buckets=any_buckets, look_ahead=look_aheads)
def test_the_oldest_goes_first_and_no_sample_waits_for_more_packs_than_the_buffer_holds(
    sizes: list[Sizes], buckets: Buckets, look_ahead: int
) -> None:
    seen_at: dict[int, int] = {}
    buffer = BucketBuffer(buckets, BUDGETS, look_ahead=look_ahead)
    draw = feed(entries(sizes))
    number = 0
    while pack := buffer.next_pack(draw):
        waiting = [entry.position for entry in buffer]
        assert waiting == sorted(waiting), "the buffer iterates oldest first"
        assert len(waiting) == len(buffer) <= look_ahead
        assert pack[0].position == min([pack[0].position, *waiting])
        for position in [*waiting, *(entry.position for entry in pack)]:
            seen_at.setdefault(position, number)
        for entry in pack:
            assert number - seen_at[entry.position] <= look_ahead
        number += 1


@FAST
@given(sizes=many_sizes, buckets=any_buckets, look_ahead=look_aheads, stop=st.integers(0, 20))
def test_a_buffer_filled_again_from_its_entries_gives_the_same_rest(
    sizes: list[Sizes], buckets: Buckets, look_ahead: int, stop: int
) -> None:
    found = entries(sizes)
    expected = all_packs(found, buckets, look_ahead=look_ahead)
    buffer = BucketBuffer(buckets, BUDGETS, look_ahead=look_ahead)
    drawn: list[Entry] = []

    def draw() -> Entry | None:
        if len(drawn) == len(found):
            return None
        drawn.append(found[len(drawn)])
        return drawn[-1]

    packs = [buffer.next_pack(draw) for _ in range(min(stop, len(expected)))]
    again = BucketBuffer(buckets, BUDGETS, look_ahead=look_ahead)
    for entry in buffer:
        again.add(entry)
    while pack := again.next_pack(draw):
        packs.append(pack)
    assert packs == expected


def test_a_pack_takes_the_next_oldest_of_the_bucket_of_the_oldest_until_it_is_full() -> None:
    packs = all_packs(texts(40, 5, 30, 6, 50, 7, 45))
    assert lengths(packs) == [[40, 30], [5, 6, 7], [50, 45]]


def test_nothing_more_is_drawn_for_a_full_pack() -> None:
    drawn = iter(texts(40, 30, 5))
    buffer = BucketBuffer(BY_LENGTH, BUDGETS, look_ahead=8)
    buffer.next_pack(lambda: next(drawn, None))
    assert [entry.tokens for entry in drawn] == [5]


def test_a_pack_goes_out_unfilled_when_the_look_ahead_holds_only_other_buckets() -> None:
    packs = all_packs(texts(40, 5, 6, 30), look_ahead=2)
    assert lengths(packs) == [[40], [5, 6], [30]]


def test_a_sample_as_long_as_a_boundary_is_of_that_bucket_and_one_longer_of_the_next() -> None:
    assert [BY_LENGTH.of(entry)[0] for entry in texts(1, 8, 9, 20, 21, 100)] == [0, 0, 1, 1, 2, 3]
    assert BY_LENGTH.padded_len(texts(9)) == 20
    assert BY_LENGTH.padded_len([]) == 0


def test_samples_without_patches_have_buckets_of_their_own_and_no_limit_by_patches() -> None:
    found = entries([(5, 0, 0), (5, 3, 0), (5, 0, 0), (5, 10, 0), (5, 11, 0)])
    assert [JOINT.of(entry) for entry in found] == [(0, 0), (0, 1), (0, 0), (0, 1), (0, 2)]
    assert [JOINT.max_samples(bucket, BUDGETS) for bucket in ((0, 0), (0, 1), (0, 2), (2, 1))] == [9, 6, 1, 2]


def test_mel_frames_close_a_pack_in_the_order_of_age() -> None:
    packs = all_packs(entries([(5, 0, 40), (5, 0, 40), (5, 0, 0)]))
    assert [[entry.position for entry in pack] for pack in packs] == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "set one of order.bucketing.boundaries and order.bucketing.quantiles"),
        (
            {"boundaries": [9], "quantiles": 2},
            "set one of order.bucketing.boundaries and order.bucketing.quantiles",
        ),
        (
            {"quantiles": 2, "patch_quantiles": 2, "patch_boundaries": [4]},
            "set one of order.bucketing.patch_boundaries and order.bucketing.patch_quantiles, or none",
        ),
        ({"boundaries": [16, 16]}, "order.bucketing.boundaries = [16, 16] do not rise from above 0"),
        ({"boundaries": [0, 16]}, "order.bucketing.boundaries = [0, 16] do not rise from above 0"),
        (
            {"boundaries": [32, 65]},
            "order.bucketing.boundaries go to 65 tokens, a pack has 64: end them at order.seq_len, "
            "or raise it",
        ),
        (
            {"quantiles": 2, "patch_boundaries": [9, 41]},
            "order.bucketing.patch_boundaries go to 41 patches, a pack has 40: end them at "
            "order.max_patches, or raise it",
        ),
    ],
)
def test_buckets_that_make_no_sense_are_refused_in_full_words(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        OrderConfig(lanes=1, packs_per_step=1, seq_len=64, max_patches=40, bucketing=BucketingConfig(**table))
    assert caught.value.errors()[0]["msg"] == f"Value error, {message}"


def test_buckets_by_patches_need_a_budget_of_patches() -> None:
    table = BucketingConfig(quantiles=2, patch_quantiles=2)
    with pytest.raises(ValidationError, match=r"set order\.max_patches"):
        OrderConfig(lanes=1, packs_per_step=1, seq_len=64, bucketing=table)


def test_settings_survive_json() -> None:
    config = BucketingConfig(boundaries=(256, 1024), patch_quantiles=4)
    assert BucketingConfig.model_validate(json.loads(config.model_dump_json())) == config


def test_buckets_save_most_of_the_padding_of_log_normal_lengths() -> None:
    random = np.random.default_rng(5)
    drawn = np.clip(np.exp(random.normal(5.5, 1.1, 20_000)), 1, 8192).astype(int).tolist()
    budgets = Budgets(tokens=8192)

    def padding(*boundaries: int) -> float:
        buckets = Buckets(boundaries)
        packs = all_packs(texts(*drawn), buckets, look_ahead=256, budgets=budgets)
        return 1 - sum(drawn) / sum(buckets.padded_len(pack) * len(pack) for pack in packs)

    assert padding(8192) > 0.94
    assert padding(256, 512, 1024, 2048, 4096, 8192) < 0.36

"""Packing: budgets kept, nothing lost or twice, nothing starves, best fit, oversize samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.packing import Budgets, Entry, PackBuffer, admit, cut_text, media_units
from omni_pipeline.core.sample import Modality, Sample, Segment
from tests.support.strategies import make_sample, media_segment, sample_lists, samples, text_segment

FAST = settings(deadline=None, max_examples=60)
BUDGETS = Budgets(tokens=500, patches=600, mel_frames=700)


def entry(sample: Sample, position: int) -> Entry:
    patches, mel_frames = media_units(sample)
    return Entry(0, position, sample, sample.num_tokens, patches, mel_frames)


def admitted_as(sample: Sample, budgets: Budgets, *, oversize: str) -> Entry | str:
    return admit(sample, budgets, oversize="cut" if oversize == "cut" else "drop", source=0, position=0)


def entries(tokens: Iterable[int], patches: Iterable[int] = ()) -> list[Entry]:
    sample = make_sample([text_segment(1)])
    sizes = dict(enumerate(patches))
    return [Entry(0, i, sample, count, sizes.get(i, 0), 0) for i, count in enumerate(tokens)]


def feed(found: list[Entry]) -> Callable[[], Entry | None]:
    rest = iter(found)
    return lambda: next(rest, None)


def all_packs(found: list[Entry], budgets: Budgets, look_ahead: int) -> list[list[Entry]]:
    buffer = PackBuffer(budgets, look_ahead=look_ahead)
    draw = feed(found)
    packs = []
    while pack := buffer.next_pack(draw):
        packs.append(pack)
    return packs


def positions(packs: list[list[Entry]]) -> list[list[int]]:
    return [[item.position for item in pack] for pack in packs]


@FAST
@given(drawn=sample_lists(), look_ahead=st.integers(1, 12), oversize=st.sampled_from(["drop", "cut"]))
def test_budgets_are_kept_and_every_sample_is_in_one_pack_or_dropped(
    drawn: list[Sample], look_ahead: int, oversize: str
) -> None:
    admitted = [admitted_as(sample, BUDGETS, oversize=oversize) for sample in drawn]
    kept = [found for found in admitted if isinstance(found, Entry)]
    dropped = [sample for sample, found in zip(drawn, admitted, strict=True) if isinstance(found, str)]
    packs = all_packs(kept, BUDGETS, look_ahead)
    packed = [item.sample for pack in packs for item in pack]
    for pack in packs:
        assert sum(item.sample.num_tokens for item in pack) <= BUDGETS.tokens
        assert sum(media_units(item.sample)[0] for item in pack) <= BUDGETS.patches
        assert sum(media_units(item.sample)[1] for item in pack) <= BUDGETS.mel_frames
    counts = Counter(sample.id for sample in packed) + Counter(sample.id for sample in dropped)
    assert counts == Counter(sample.id for sample in drawn)
    assert sorted(packed, key=lambda sample: sample.id) == [found.sample for found in kept]


@FAST
@given(tokens=st.lists(st.integers(1, 100), max_size=80), look_ahead=st.integers(1, 10))
def test_after_every_pack_each_drawn_sample_is_packed_or_buffered(tokens: list[int], look_ahead: int) -> None:
    taken: list[int] = []
    source = feed(entries(tokens))
    buffer = PackBuffer(Budgets(tokens=100), look_ahead=look_ahead)
    drawn: list[int] = []

    def draw() -> Entry | None:
        found = source()
        if found is not None:
            drawn.append(found.position)
        return found

    while pack := buffer.next_pack(draw):
        taken += [item.position for item in pack]
        waiting = [item.position for item in buffer]
        assert sorted(taken + waiting) == drawn
        assert waiting == sorted(waiting), "the buffer iterates oldest first"
        assert len(buffer) <= look_ahead


@FAST
@given(tokens=st.lists(st.integers(1, 100), max_size=120), look_ahead=st.integers(1, 10))
def test_no_sample_waits_for_more_packs_than_the_buffer_holds(tokens: list[int], look_ahead: int) -> None:
    seen_at: dict[int, int] = {}
    buffer = PackBuffer(Budgets(tokens=100), look_ahead=look_ahead)
    draw = feed(entries(tokens))
    number = 0
    while pack := buffer.next_pack(draw):
        oldest = min([item.position for item in [*pack, *buffer]])
        assert pack[0].position == oldest
        for item in [*pack, *buffer]:
            seen_at.setdefault(item.position, number)
        for item in pack:
            assert number - seen_at[item.position] <= look_ahead
        number += 1


def test_the_largest_that_fits_follows_the_oldest_and_ties_go_to_the_older() -> None:
    packs = all_packs(entries([40, 30, 50, 60, 60, 10]), Budgets(tokens=100), 6)
    assert positions(packs) == [[0, 3], [1, 4, 5], [2]]


def test_a_larger_sample_that_another_budget_refuses_is_passed_over() -> None:
    found = entries([40, 60, 20], patches=[8, 8, 2])
    assert positions(all_packs(found, Budgets(tokens=100, patches=10), 3)) == [[0, 2], [1]]


def test_the_buffer_is_topped_up_while_a_pack_is_filled() -> None:
    packs = all_packs(entries([1] * 100), Budgets(tokens=100), 4)
    assert positions(packs) == [list(range(100))]


def test_mel_frames_have_a_budget_of_their_own() -> None:
    recording = make_sample([media_segment(Modality.AUDIO, (400, 1, 1))])
    found = [entry(recording, 0), entry(recording, 1)]
    assert positions(all_packs(found, BUDGETS, 4)) == [[0], [1]]


def test_media_units_adds_images_and_videos_and_counts_audio_apart() -> None:
    sample = make_sample(
        [
            media_segment(Modality.IMAGE, (1, 4, 6)),
            text_segment(9),
            media_segment(Modality.VIDEO, (3, 2, 2)),
            media_segment(Modality.AUDIO, (50, 1, 1)),
        ]
    )
    assert media_units(sample) == (36, 50)


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ([media_segment(Modality.VIDEO, (7, 10, 10))], "700 patches, limit 600 (order.max_patches)"),
        ([media_segment(Modality.AUDIO, (800, 1, 1))], "800 mel frames, limit 700 (order.max_mel_frames)"),
        ([text_segment(500)], "501 tokens, limit 500 (order.seq_len)"),
    ],
)
def test_an_oversize_sample_is_dropped_with_value_limit_and_setting(
    segments: list[Segment], reason: str
) -> None:
    sample = make_sample(segments)
    assert admitted_as(sample, BUDGETS, oversize="drop") == reason


def test_a_sample_of_exactly_the_budget_is_kept_whole() -> None:
    sample = make_sample([text_segment(499)])
    assert admitted_as(sample, BUDGETS, oversize="drop") == entry(sample, 0)


def test_a_sample_without_tokens_is_dropped() -> None:
    empty = Sample(make_sample([]).id, "key", "shard", (), num_tokens=0, num_labels=0)
    assert admitted_as(empty, BUDGETS, oversize="cut") == "no tokens"


@FAST
@given(sample=samples(), max_tokens=st.integers(1, 300))
def test_cut_shortens_only_trailing_text_and_keeps_counts_right(sample: Sample, max_tokens: int) -> None:
    if sample.num_tokens <= max_tokens:
        return
    shorter = cut_text(sample, max_tokens=max_tokens)
    last = sample.segments[-1]
    if last.is_media or last.num_tokens - (sample.num_tokens - max_tokens) < 1:
        assert shorter is None
        return
    assert shorter is not None
    assert shorter.segments[:-1] == sample.segments[:-1]
    assert shorter.id == sample.id
    kept = text_segment(last.num_tokens - (sample.num_tokens - max_tokens), loss=last.loss)
    recounted = make_sample([*sample.segments[:-1], kept])
    assert (shorter.num_tokens, shorter.num_labels) == (max_tokens, recounted.num_labels)
    assert recounted.num_tokens == max_tokens
    end = shorter.segments[-1]
    assert (end.grid, end.num_tokens) == ((kept.num_tokens, 1, 1), kept.num_tokens)
    assert (end.offset, end.length) == (last.offset, last.length)


@pytest.mark.parametrize(("loss", "labels"), [(True, 49), (False, 0)])
def test_cut_takes_labels_away_only_where_the_text_had_them(loss: bool, labels: int) -> None:
    shorter = cut_text(make_sample([text_segment(90, loss=loss)]), max_tokens=50)
    assert shorter is not None
    assert shorter.num_labels == labels


def test_cut_never_reaches_into_media() -> None:
    picture = media_segment(Modality.IMAGE, (1, 40, 40))
    budgets = Budgets(tokens=100)
    for parts in ([text_segment(9), picture], [picture, text_segment(9)]):
        sample = make_sample(parts)
        reason = admitted_as(sample, budgets, oversize="cut")
        assert isinstance(reason, str)
        assert reason.endswith("limit 100 (order.seq_len); no text at its end that could be cut")

"""Packing: budgets kept, nothing lost or twice, nothing starves, best fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.fitting import cut_text, fit, media_units, sizes_of
from loaders.packing import Budgets, Entry, PackBuffer
from omni_pipeline.core.sample import Sample
from tests.support.strategies import sample_lists

FAST = settings(deadline=None, max_examples=60)
BUDGETS = Budgets(tokens=500, patches=600, mel_frames=700, samples=5)


def entries(tokens: Iterable[int], patches: Iterable[int] = ()) -> list[Entry]:
    sizes = dict(enumerate(patches))
    return [Entry(0, i, i, count, sizes.get(i, 0), 0) for i, count in enumerate(tokens)]


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
    sizes = sizes_of(drawn)
    tokens, fits = fit(sizes, BUDGETS, oversize="cut" if oversize == "cut" else "drop")
    kept = [
        Entry(0, i, i, int(tokens[i]), int(sizes.patches[i]), int(sizes.mel_frames[i]))
        for i in range(len(drawn))
        if fits[i]
    ]
    packs = all_packs(kept, BUDGETS, look_ahead)
    for pack in packs:
        samples = [cut_text(drawn[item.ordinal], max_tokens=item.tokens) for item in pack]
        assert sum(sample.num_tokens for sample in samples) <= BUDGETS.tokens
        assert sum(media_units(sample)[0] for sample in samples) <= BUDGETS.patches
        assert sum(media_units(sample)[1] for sample in samples) <= BUDGETS.mel_frames
        assert len(samples) <= BUDGETS.samples
    assert sorted(item for pack in packs for item in pack) == kept


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
    found = [Entry(0, i, i, 102, 0, 400) for i in range(2)]
    assert positions(all_packs(found, BUDGETS, 4)) == [[0], [1]]


def test_samples_have_a_budget_of_their_own() -> None:
    found = entries([10] * 5)
    assert positions(all_packs(found, Budgets(tokens=100, samples=2), 3)) == [[0, 1], [2, 3], [4]]

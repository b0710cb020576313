"""Draw: every source within one sample of its share, whatever the shares and sizes; exact to resume."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loaders.draw import Draw
from loaders.mixture import Mixture, Moment
from loaders.weight import Shape, WeightTable

FAST = settings(deadline=None, max_examples=150)
ROUNDING = 1e-9

weights = st.lists(
    st.one_of(st.floats(0.001, 100), st.integers(1, 5).map(float), st.sampled_from([1e-12, 1e-6, 1e6, 1e12])),
    min_size=1,
    max_size=12,
)
# Sizes of a source's samples, repeated: all alike (as where samples are the unit), or very different.
lengths = st.lists(
    st.one_of(st.just([1]), st.lists(st.integers(1, 5000), min_size=1, max_size=9), st.just([1, 9999])),
    min_size=12,
    max_size=12,
)


@dataclass
class Lane:
    """Sources whose samples repeat ``sizes``, and what was drawn of them."""

    draw: Draw
    sizes: Sequence[Sequence[int]]
    num_drawn: list[int] = field(default_factory=list)
    largest: int = 0
    drawn: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_drawn = self.num_drawn or [0] * len(self.draw.credit)

    @property
    def heads(self) -> list[int]:
        return [sizes[n % len(sizes)] for n, sizes in zip(self.num_drawn, self.sizes, strict=False)]

    def next(self) -> tuple[int, int]:
        """Draw a sample; returns its source and size."""
        heads = self.heads
        self.largest = max(self.largest, *heads)
        source = self.draw.next(heads)
        assert source is not None
        self.draw.charge(source, heads[source])
        self.num_drawn[source] += 1
        self.drawn.append(source)
        return source, heads[source]


def normalised(values: Sequence[float]) -> list[float]:
    total = math.fsum(values)
    return [value / total for value in values]


def new_lane(shares: Sequence[float], sizes: Sequence[Sequence[int]]) -> Lane:
    lane = Lane(Draw([0.0] * len(shares)), sizes)
    lane.draw.set_shares(shares)
    return lane


@FAST
@given(values=weights, sizes=lengths, num_draws=st.integers(1, 400), per_step=st.integers(1, 50))
def test_with_constant_shares_no_source_is_ever_more_than_one_sample_from_its_share(
    values: list[float], sizes: list[list[int]], num_draws: int, per_step: int
) -> None:
    shares = normalised(values)
    exact = [Fraction(share) for share in shares]
    amounts = [0] * len(shares)
    lane = new_lane(shares, sizes)
    for number in range(num_draws):
        if number % per_step == 0:
            lane.draw.set_shares(shares)
        source, size = lane.next()
        amounts[source] += size
        within = lane.largest * (1 + ROUNDING)
        for share, amount, credit in zip(exact, amounts, lane.draw.credit, strict=True):
            owed = float(share * sum(amounts) - amount)
            assert owed == pytest.approx(credit, abs=lane.largest * ROUNDING)
            assert -within <= owed <= within


@FAST
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.sampled_from([1e-6, 0.01, 1.0, 7.0]), min_size=6, max_size=6), st.integers(1, 9)
        ),
        min_size=1,
        max_size=40,
    ),
    sizes=lengths,
)
@example(steps=[([7.0, 1.0, 1.0, 1.0, 1.0, 1.0], 9)], sizes=[[1]] * 6)
def test_while_shares_change_no_source_is_more_than_one_sample_ahead_and_the_deficit_is_bounded(
    steps: list[tuple[list[float], int]], sizes: list[list[int]]
) -> None:
    num_sources = len(steps[0][0])
    lane = Lane(Draw([0.0] * num_sources), sizes)
    owed = [0.0] * num_sources
    for values, num_draws in steps:
        shares = normalised(values)
        lane.draw.set_shares(shares)
        for _ in range(num_draws):
            source, size = lane.next()
            owed = [value + share * size for value, share in zip(owed, shares, strict=True)]
            owed[source] -= size
            assert lane.draw.credit == pytest.approx(owed, abs=lane.largest * ROUNDING)
            assert min(owed) >= -lane.largest * (1 + ROUNDING)
            assert max(owed) <= (num_sources - 1) * lane.largest * (1 + ROUNDING)


@pytest.mark.parametrize("curve", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("by_tokens", [False, True])
def test_over_a_schedule_no_source_was_more_than_one_sample_from_its_share(
    curve: Shape, by_tokens: bool
) -> None:
    rng = random.Random(5)
    for num_sources in range(2, 9):
        mixture = Mixture(
            {
                f"source-{index}": WeightTable(
                    points=tuple((at, rng.uniform(0.5, 10)) for at in (0, 60, 100, 199)), curve=curve
                )
                for index in range(num_sources)
            }
        )
        sizes = [[rng.randint(1, 999) if by_tokens else 1 for _ in range(30)] for _ in range(num_sources)]
        lane = Lane(Draw([0.0] * num_sources), sizes)
        for step in range(200):
            lane.draw.set_shares(mixture.shares(Moment(step)))
            for _ in range(16):
                lane.next()
                assert max(map(abs, lane.draw.credit)) <= lane.largest * (1 + ROUNDING)


@FAST
@given(data=st.data(), values=weights, sizes=lengths, unit=st.sampled_from(["constant", "changing"]))
def test_a_lane_resumed_from_json_at_any_step_gives_the_same_draws_and_the_same_bits(
    data: st.DataObject, values: list[float], sizes: list[list[int]], unit: str
) -> None:
    rows = [values, values[::-1]] if unit == "changing" else [values]
    per_step = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=20))
    cut = data.draw(st.integers(0, len(per_step)))

    def follow(lane: Lane, first: int, last: int) -> None:
        for step in range(first, last):
            lane.draw.set_shares(normalised(rows[step % len(rows)]))
            for _ in range(per_step[step]):
                lane.next()

    whole, before = Lane(Draw([0.0] * len(values)), sizes), Lane(Draw([0.0] * len(values)), sizes)
    follow(whole, 0, len(per_step))
    follow(before, 0, cut)
    saved = json.loads(json.dumps(before.draw.credit))
    after = Lane(Draw(saved), sizes, num_drawn=before.num_drawn)
    assert after.draw.credit == saved
    follow(after, cut, len(per_step))
    assert before.drawn + after.drawn == whole.drawn
    assert after.draw.credit == whole.draw.credit


@FAST
@given(values=weights, sizes=lengths, leaving=st.data())
def test_a_source_that_leaves_starts_all_credits_again_and_the_bound_holds_from_there(
    values: list[float], sizes: list[list[int]], leaving: st.DataObject
) -> None:
    lane = new_lane(normalised(values), sizes)
    for _ in range(17):
        lane.next()
    gone = leaving.draw(st.sets(st.integers(0, len(values) - 1), max_size=len(values) - 1))
    left = [0.0 if index in gone else value for index, value in enumerate(values)]
    had_credit = any(lane.draw.credit[index] != 0 for index in gone)
    lane.draw.set_shares(normalised(left))
    assert not had_credit or lane.draw.credit == [0.0] * len(values)
    for _ in range(60):
        source, _ = lane.next()
        assert source not in gone
        assert all(lane.draw.credit[index] == 0 for index in gone)
        assert max(map(abs, lane.draw.credit)) <= lane.largest * (1 + ROUNDING)


def test_shares_are_exact_after_very_many_steps() -> None:
    shares = normalised([0.1, 0.2, 0.3, 1e-3, 7])
    lane = new_lane(shares, [[137, 5, 999], [1], [4096, 77], [300], [2, 8191]])
    amounts = [0] * len(shares)
    for _ in range(50_000):
        lane.draw.set_shares(shares)
        source, size = lane.next()
        amounts[source] += size
    owed = [
        float(Fraction(share) * sum(amounts) - amount) for share, amount in zip(shares, amounts, strict=True)
    ]
    assert lane.draw.credit == pytest.approx(owed, abs=1e-6)


def test_the_rule_is_the_known_one_for_samples_of_one_size() -> None:
    lane = new_lane([0.5, 0.3, 0.2], [[1], [1], [1]])
    for _ in range(10):
        lane.next()
    assert "".join("abc"[source] for source in lane.drawn) == "abacababac"


def test_a_jump_to_the_sources_that_are_owed_most_costs_more_than_one_sample_under_any_rule() -> None:
    lane = new_lane([1 / 6] * 6, [[1]] * 6)
    for _ in range(3):
        lane.next()
    assert lane.draw.credit == pytest.approx([-1 / 2] * 3 + [1 / 2] * 3)
    # Sources with next to no share, not none: those would start all credits again.
    lane.draw.set_shares(normalised([1e-12] * 3 + [1] * 3))
    for _ in range(2):
        lane.next()
    assert max(lane.draw.credit) == pytest.approx(7 / 6)


def test_ties_go_by_name() -> None:
    lane = new_lane([0.25, 0.25, 0.25, 0.25], [[1]] * 4)
    for _ in range(8):
        lane.next()
    assert lane.drawn == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_rare_source_is_drawn_once_in_its_turn() -> None:
    lane = new_lane([0.999, 0.001], [[1], [1]])
    for _ in range(3000):
        lane.next()
    turns = [number for number, source in enumerate(lane.drawn) if source == 1]
    assert [turn // 1000 for turn in turns] == [0, 1, 2]


def test_nothing_is_drawn_where_no_source_has_a_share() -> None:
    draw = Draw([0.5, -0.5])
    draw.set_shares([0.0, 0.0])
    assert draw.next([1, 1]) is None
    assert draw.credit == [0.0, 0.0]


def test_where_rounding_leaves_no_source_begun_the_one_owed_most_is_drawn() -> None:
    draw = Draw([-2e-15, -1e-15])
    draw.set_shares([0.5, 0.5])
    assert draw.next([1, 1]) == 1

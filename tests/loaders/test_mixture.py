"""Mixture: shares exact within a proven bound, schedules, zero weights, sources that leave."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.mixture import Mixture, Moment, charge, next_source, settle
from loaders.weight import Weight, curve_of
from omni_pipeline.core.errors import ConfigError

FAST = settings(deadline=None, max_examples=100)
NAMES = "abcdefgh"

weights = st.lists(st.floats(0.001, 100), min_size=1, max_size=6)


def named(values: list[float]) -> dict[str, Weight]:
    return dict(zip(NAMES, values, strict=False))


def draw(credit: list[float], shares: tuple[float, ...], size: int) -> int:
    settle(credit, shares)
    source = next_source(credit, shares)
    assert source is not None
    charge(credit, shares, source=source, size=size)
    return source


def harmonic(count: int) -> float:
    return sum(1 / k for k in range(1, count + 1))


@FAST
@given(values=weights, sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=300))
def test_what_each_source_gave_is_its_share_within_the_proven_bound(
    values: list[float], sizes: list[int]
) -> None:
    shares = Mixture(named(values)).shares(Moment(0))
    credit = [0.0] * len(values)
    given_tokens = [0] * len(values)
    largest = 0
    for size in sizes:
        given_tokens[draw(credit, shares, size)] += size
        largest = max(largest, size)
        total = sum(given_tokens)
        for share, tokens, owed in zip(shares, given_tokens, credit, strict=True):
            assert owed == pytest.approx(share * total - tokens, abs=1e-6 * largest)
            assert -largest * (1 + 1e-9) <= owed <= largest * harmonic(len(values) - 1) + 1e-6


@FAST
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.sampled_from([0.0, 0.1, 1.0, 7.0]), min_size=4, max_size=4), st.integers(1, 99)
        ),
        max_size=300,
    )
)
def test_the_bound_holds_while_weights_change_and_vanish_at_every_draw(
    steps: list[tuple[list[float], int]],
) -> None:
    credit = [0.0] * 4
    largest = 0
    for values, size in steps:
        total = sum(values)
        if total == 0:
            continue
        shares = tuple(value / total for value in values)
        source = draw(credit, shares, size)
        largest = max(largest, size)
        assert values[source] > 0
        assert sum(credit) == pytest.approx(0, abs=1e-6)
        for value, owed in zip(values, credit, strict=True):
            assert -largest * (1 + 1e-9) <= owed <= largest * harmonic(3) + 1e-6
            assert value > 0 or owed == 0


def test_two_sources_are_never_more_than_one_sample_from_their_shares() -> None:
    shares = Mixture({"images": 9, "text": 1}).shares(Moment(0))
    credit = [0.0, 0.0]
    drawn = [draw(credit, shares, 1) for _ in range(1000)]
    for end in range(1, 1001):
        assert abs(drawn[:end].count(0) - 0.9 * end) <= 1 + 1e-9
    assert drawn.count(0) == 900


def test_ties_go_by_name() -> None:
    mixture = Mixture({"b": 1, "a": 1})
    credit = [0.0, 0.0]
    drawn = [mixture.names[draw(credit, mixture.shares(Moment(0)), 1)] for _ in range(4)]
    assert drawn == ["a", "b", "a", "b"]


@FAST
@given(values=weights, sizes=st.lists(st.integers(1, 999), max_size=60), cut=st.integers(0, 60))
def test_credits_through_json_continue_exactly(values: list[float], sizes: list[int], cut: int) -> None:
    shares = Mixture(named(values)).shares(Moment(0))
    whole = [0.0] * len(values)
    expected = [draw(whole, shares, size) for size in sizes]
    credit = [0.0] * len(values)
    got = [draw(credit, shares, size) for size in sizes[:cut]]
    credit = json.loads(json.dumps(credit))
    got += [draw(credit, shares, size) for size in sizes[cut:]]
    assert got == expected
    assert credit == whole


def test_weights_are_linear_between_points_and_constant_outside() -> None:
    mixture = Mixture({"a": [[10, 0.0], [20, 1.0], [30, 0.5]], "b": 0.5})
    curve = curve_of([[10, 0.0], [20, 1.0], [30, 0.5]])
    assert [curve(step) for step in (0, 10, 15, 20, 24, 30, 10**9)] == [
        0.0, 0.0, 0.5, 1.0, 0.8, 0.5, 0.5,
    ]  # fmt: skip
    assert mixture.shares(Moment(20)) == (1 / 1.5, 0.5 / 1.5)


def test_a_schedule_is_looked_up_by_step_in_any_order_of_asking() -> None:
    mixture = Mixture({"a": [[0, 1.0], [10, 0.0]], "b": [[0, 0.0], [10, 1.0]]})
    forward = [mixture.shares(Moment(step)) for step in range(12)]
    assert [mixture.shares(Moment(step)) for step in reversed(range(12))] == forward[::-1]


def test_a_source_of_weight_zero_is_never_drawn_and_gathers_no_credit() -> None:
    mixture = Mixture({"a": 1, "b": [[0, 0], [100, 0], [101, 1]]})
    credit = [0.0, 0.0]
    assert {draw(credit, mixture.shares(Moment(step)), 10) for step in range(100)} == {0}
    assert credit == [0.0, 0.0]
    later = [draw(credit, mixture.shares(Moment(101)), 10) for _ in range(10)]
    assert later.count(1) == 5


def test_when_a_source_is_used_up_the_others_renormalise() -> None:
    mixture = Mixture({"a": 1, "b": 1, "c": 2})
    assert mixture.shares(Moment(0), used_up=frozenset({2})) == (0.5, 0.5, 0.0)
    assert mixture.shares(Moment(0), used_up=frozenset({0, 1, 2})) == (0.0, 0.0, 0.0)
    assert next_source([0.0, 0.0, 0.0], (0.0, 0.0, 0.0)) is None


def test_shares_of_many_awkward_weights_sum_to_one() -> None:
    mixture = Mixture(named([0.1, 0.2, 0.3, 1e-9, 7, 1 / 3, 2 / 3, 1e9]))
    assert math.fsum(mixture.shares(Moment(0))) == pytest.approx(1, abs=1e-15)


def test_drawn_from_names_sources_that_still_have_a_weight_ahead() -> None:
    mixture = Mixture({"a": 1, "early": [[0, 1], [10, 0]], "late": [[50, 0], [60, 1]], "never": 0})
    assert mixture.drawn_from(Moment(0)) == {0, 1, 2}
    assert mixture.drawn_from(Moment(10)) == {0, 2}


def test_weights_that_are_all_zero_at_some_step_are_refused_in_full_words() -> None:
    with pytest.raises(ConfigError) as caught:
        Mixture({"b": [[0, 1], [10, 0]], "a": [[10, 0], [20, 1]]})
    assert str(caught.value) == (
        "all weights are zero at step 10\n"
        "  where: sources a, b\n"
        "  fix:   give at least one source a positive weight at every moment"
    )


@pytest.mark.parametrize(
    ("weight", "what"),
    [
        (-1.0, "weight -1.0 is not a finite number of at least 0"),
        (math.nan, "weight nan is not a finite number of at least 0"),
        ([[0, 1], [5, math.inf]], "weight inf is not a finite number of at least 0"),
        ([[5, 1], [5, 2]], "steps [5, 5] of the weight do not rise"),
        ([[-1, 1]], "weight has a point at steps -1, which is below 0"),
        ([[0.5, 1]], "weight has a point at step 0.5, which is no step"),
        ([], "weight [] is no number, no list of [step, weight] points, and no table with points"),
        (
            [[1, 2, 3]],
            "weight [[1, 2, 3]] is no number, no list of [step, weight] points, and no table with points",
        ),
    ],
)
def test_a_wrong_weight_says_what_is_wrong(weight: Weight, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Mixture({"laion": weight, "other": 1})
    assert caught.value.what == what
    assert caught.value.where == "source 'laion'"


def test_a_mixture_needs_a_source() -> None:
    with pytest.raises(ConfigError, match="no sources"):
        Mixture({})

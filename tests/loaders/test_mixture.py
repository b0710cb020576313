"""Mixture: shares exact within a proven bound, schedules, zero weights, sources that leave."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from loaders.mixture import Mixture, Moment
from loaders.weight import Weight, curve_of
from omni_pipeline.core.errors import ConfigError

FAST = settings(deadline=None, max_examples=100)
NAMES = "abcdefgh"

weights = st.lists(st.floats(0.001, 100), min_size=1, max_size=6)


def named(values: list[float]) -> dict[str, Weight]:
    return dict(zip(NAMES, values, strict=False))


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


def test_when_a_source_is_used_up_the_others_renormalise() -> None:
    mixture = Mixture({"a": 1, "b": 1, "c": 2})
    assert mixture.shares(Moment(0), used_up=frozenset({2})) == (0.5, 0.5, 0.0)
    assert mixture.shares(Moment(0), used_up=frozenset({0, 1, 2})) == (0.0, 0.0, 0.0)


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

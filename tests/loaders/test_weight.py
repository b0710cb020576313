"""Weight: forms in a run file, curves between points, and what is said of wrong ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from loaders.weight import Curve, Shape, Weight, WeightTable, curve_of
from omni_pipeline.core.config import validate
from omni_pipeline.core.errors import ConfigError

FAST = settings(deadline=None, max_examples=100)
POINTS = [[10, 0.0], [20, 1.0], [30, 0.5]]


class Settings(BaseModel):
    weight: Weight = 1.0


def table(curve: Shape, *, over: str = "steps") -> Curve:
    return curve_of(WeightTable.model_validate({"points": POINTS, "curve": curve, "over": over}))


def test_a_number_holds_for_the_whole_run() -> None:
    assert [curve_of(0.25)(step) for step in (0, 7, 10**12)] == [0.25] * 3


def test_points_are_linear_between_and_constant_outside() -> None:
    times = (0, 10, 15, 20, 24, 30, 10**9)
    assert [curve_of(POINTS)(time) for time in times] == [0.0, 0.0, 0.5, 1.0, 0.8, 0.5, 0.5]
    assert [table("linear")(time) for time in times] == [curve_of(POINTS)(time) for time in times]


def test_the_first_point_holds_before_it_too() -> None:
    assert [curve_of([[5, 2.0], [6, 1.0]])(time) for time in (0, 4, 5, 6)] == [2.0, 2.0, 2.0, 1.0]


def test_a_constant_curve_holds_each_weight_until_the_next_point() -> None:
    assert [table("constant")(time) for time in (0, 10, 19, 20, 29, 30, 99)] == [
        0.0, 0.0, 0.0, 1.0, 1.0, 0.5, 0.5,
    ]  # fmt: skip


def test_a_cosine_curve_is_half_a_wave_between_points() -> None:
    times = (10, 12.5, 15, 20, 25, 30)
    expected = [0.0, (1 - math.sqrt(0.5)) / 2, 0.5, 1.0, 0.75, 0.5]
    assert [table("cosine")(time) for time in times] == pytest.approx(expected, abs=1e-15)


def test_a_table_says_what_its_points_are_at() -> None:
    assert table("linear").clock == "steps"
    assert table("linear", over="tokens").clock == "tokens"


@FAST
@given(
    values=st.lists(st.floats(0, 1e12), min_size=1, max_size=5),
    shape=st.sampled_from(["constant", "linear", "cosine"]),
    time=st.integers(0, 50),
)
def test_a_curve_stays_between_the_weights_of_the_points_around(
    values: list[float], shape: Shape, time: int
) -> None:
    curve = Curve("steps", shape, tuple(10 * index for index in range(len(values))), tuple(values))
    before = values[min(time // 10, len(values) - 1)]
    after = values[min(time // 10 + 1, len(values) - 1)]
    rounding = 1e-12 * max(before, after)
    assert min(before, after) - rounding <= curve(time) <= max(before, after) + rounding
    assert curve(time) >= 0


@pytest.mark.parametrize(
    "given_weight",
    [2, 0.5, [[0, 1.0], [10, 0.0]], {"points": [[0, 1], [10**12, 3]], "over": "tokens", "curve": "cosine"}],
)
def test_each_form_is_read_and_written_back_as_it_was_meant(given_weight: Any) -> None:
    first = validate(Settings, {"weight": given_weight}, where="run.toml")
    again = validate(Settings, first.model_dump(mode="json"), where="run.toml")
    assert first == again
    assert curve_of(first.weight) == curve_of(again.weight)
    if isinstance(given_weight, dict):
        assert curve_of(first.weight) == Curve("tokens", "cosine", (0, 10**12), (1.0, 3.0))
    else:
        assert curve_of(first.weight) == curve_of(given_weight)


@pytest.mark.parametrize(
    ("given_weight", "message"),
    [
        (-1, "setting 'weight': weight -1.0 is not a finite number of at least 0, got -1"),
        (math.inf, "setting 'weight': weight inf is not a finite number of at least 0, got inf"),
        (
            "much",
            "setting 'weight': weight 'much' is no number, no list of [step, weight] points, "
            "and no table with points, got 'much'",
        ),
        ([[5, 1], [5, 2]], "setting 'weight': steps [5, 5] of the weight do not rise"),
        ([[0.5, 1]], "setting 'weight': weight has a point at step 0.5, which is no step"),
        ({"points": []}, "setting 'weight': weight has no points"),
        ({"points": [[0, 1], [9, -2]]}, "setting 'weight': weight -2.0 is not a finite number of at least 0"),
        (
            {"points": [[9, 1], [3, 1]], "over": "tokens"},
            "setting 'weight': tokens [9, 3] of the weight do not rise",
        ),
        (
            {"points": [[0, 1]], "curve": "sine"},
            "setting 'weight.curve': Input should be 'constant', 'linear' or 'cosine', got 'sine'",
        ),
        (
            {"point": [[0, 1]]},
            "setting 'weight.points' is required\nunknown setting 'weight.point'; did you mean 'points'?",
        ),
    ],
)
def test_a_wrong_weight_in_a_run_file_is_told_once_by_the_form_that_was_meant(
    given_weight: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Settings, {"weight": given_weight}, where="run.toml")
    assert caught.value.what == message

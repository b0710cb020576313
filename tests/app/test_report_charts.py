"""Charts keep spikes and gaps, and their axes carry round numbers."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_pipeline.app import report_charts as charts


def chart_of(values: list[float], **options: object) -> charts.Chart | None:
    line = charts.Line("loss", np.arange(len(values), dtype=np.int64), np.array(values), style="smooth")
    return charts.line_chart([line], label="loss", form=charts.compact, **options)  # type: ignore[arg-type]


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_ascending_and_inside(low: float, span: float) -> None:
    ticks = charts.nice_ticks(low, low + span)
    assert 1 <= len(ticks) <= 8
    assert ticks == sorted(ticks)
    assert all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in ticks)


def test_ticks_are_round() -> None:
    assert charts.nice_ticks(0.0, 7.1, number=4) == [0, 2, 4, 6]


def test_nothing_to_draw_gives_no_chart() -> None:
    assert chart_of([]) is None
    assert chart_of([math.nan, math.inf]) is None
    assert charts.share_chart({}, label="mixture") is None
    zeros = (np.arange(3), np.zeros(3))
    assert charts.share_chart({"a": zeros}, label="mixture") is None


def test_one_value_is_a_dot() -> None:
    chart = chart_of([2.0])
    assert chart is not None
    assert "<circle" in chart.svg


def test_the_tooltip_names_what_the_chart_runs_over() -> None:
    over_steps, over_shares = chart_of([1.0, 2.0]), chart_of([1.0, 2.0], axis="share of media")
    assert over_steps is not None
    assert over_shares is not None
    assert (over_steps.data["axis"], over_shares.data["axis"]) == ("step", "share of media")


def test_a_gap_lifts_the_pen() -> None:
    chart = chart_of([1.0, 2.0, math.nan, 1.0, 2.0])
    assert chart is not None
    (path,) = re.findall(r'd="([^"]*)"', chart.svg)
    assert path.count("M") == 2


def test_a_single_spike_in_a_long_line_is_drawn() -> None:
    values = [1.0] * 5000
    values[2345] = 9.0
    chart = chart_of(values)
    assert chart is not None
    (band,) = re.findall(r'<polygon class="band f0" points="([^"]*)"', chart.svg)
    heights = [float(point.split(",")[1]) for point in band.split()]
    assert min(heights) < 40
    assert len(chart.svg) < 40_000


def test_moving_mean_keeps_a_constant_and_its_gaps() -> None:
    values = np.array([2.0, 2.0, math.nan, 2.0, 2.0, 2.0])
    mean = charts.moving_mean(values, window=4)
    assert np.array_equal(np.isnan(mean), np.isnan(values))
    assert mean[~np.isnan(mean)].tolist() == [2.0] * 5


def test_moving_mean_keeps_both_ends_of_a_steep_line() -> None:
    values = np.exp(-np.arange(100) / 5.0)
    mean = charts.moving_mean(values, window=20)
    assert mean[0] == pytest.approx(values[0])
    assert mean[-1] == pytest.approx(values[-1])
    assert mean[50] == pytest.approx(values[40:61].mean())


def test_shares_add_up_to_one() -> None:
    amounts = {
        "a": (np.arange(300), np.full(300, 3.0)),
        "b": (np.arange(100, 300), np.full(200, 1.0)),
    }
    chart = charts.share_chart(amounts, label="mixture")
    assert chart is not None
    first, second = chart.data["series"]
    assert len(first["x"]) <= 120
    assert (first["text"][0], second["text"][0]) == ("100%", "0%")
    assert (first["text"][-1], second["text"][-1]) == ("75%", "25%")


def test_a_mixture_of_one_step_fills_the_width() -> None:
    chart = charts.share_chart({"a": (np.array([4]), np.array([2.0]))}, label="mixture")
    assert chart is not None
    assert chart.svg.count("<polygon") == 1


def test_labels_of_marks_share_two_rows_and_the_rest_is_in_titles() -> None:
    marks = [charts.Mark(step, f"rank {step} killed at step {step}", "fault") for step in range(6)]
    chart = chart_of([1.0, 2.0] * 60, width=charts.WIDE, marks=marks)
    assert chart is not None
    assert chart.svg.count("<title>") == 6
    assert chart.svg.count("marktext") == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.744, "0.744"), (1234.5, "1,234"), (31070, "31.1k"), (6.36e6, "6.36M"), (2e-4, "0.0002")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert charts.compact(value) == text


def test_tiny_numbers_are_in_powers_of_ten() -> None:
    assert charts.compact(2e-5) == "2e-5"

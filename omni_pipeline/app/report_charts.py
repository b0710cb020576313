"""Charts of the report as inline SVG: lines with marks, and stacked shares.

Drawn by hand, not by a plotting library, so that text stays text, colours come from the page's CSS variables
(light and dark) and a chart of thousands of steps costs some ten kilobytes: long lines are cut into buckets,
each shown by its mean with the band from its least to its largest value, so no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

FloatArray = npt.NDArray[np.float64]

MAX_POINTS = 360
WIDE, NARROW = 1140, 552
_HEIGHTS = {WIDE: 300, NARROW: 230}
_LEFT, _RIGHT, _BOTTOM = 58, 14, 30
_TOPS = {WIDE: 36, NARROW: 10}
_RAW_POINTS = 3 * MAX_POINTS
_SMOOTH_FROM = 60


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Args:
        name: For legend and tooltip.
        steps: [n] ascending.
        values: [n]; a value that is no finite number leaves a gap.
        colour: Number of a page colour, from 0.
        style: ``smooth`` draws the values faintly and their moving mean boldly.
    """

    name: str
    steps: npt.NDArray[np.int64]
    values: FloatArray
    colour: int = 0
    style: Literal["solid", "dashed", "smooth"] = "solid"


@dataclass(frozen=True)
class Mark:
    """A vertical mark at a step."""

    step: float
    label: str
    kind: str = "note"


@dataclass(frozen=True)
class Chart:
    """A drawn chart: the SVG, and the numbers behind the tooltip (JSON-plain)."""

    svg: Markup
    data: dict[str, Any]
    legend: Sequence[tuple[str, int, str]]


@dataclass(frozen=True)
class _Frame:
    """Maps steps and values to pixels of the view box."""

    width: int
    height: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    @property
    def top(self) -> int:
        return _TOPS[self.width]

    def x(self, step: float) -> float:
        low, high = self.x_range
        return _LEFT + (step - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - self.top - _BOTTOM)


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    form: Callable[[float], str],
    width: int = NARROW,
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
    reference: float | None = None,
    axis: str = "step",
) -> Chart | None:
    """Return a chart of ``lines``, or None where there is nothing to draw.

    Args:
        lines: Lines without any finite value are left out.
        label: What it shows, for screen readers.
        form: Text of a value, on the axis and in the tooltip.
        width: WIDE or NARROW.
        marks: Vertical marks; those outside of the steps are moved to the nearest end.
        from_zero: Whether the value axis starts at zero.
        reference: A dotted horizontal line, e.g. the perfect value.
        axis: What the steps are, in the tooltip.
    """
    drawn = [line for line in lines if np.isfinite(line.values).any()]
    if not drawn:
        return None
    frame = _Frame(
        width, _HEIGHTS[width], _step_range(drawn), _value_range(drawn, from_zero=from_zero, also=reference)
    )
    parts = [_open(frame, label), _axes(frame, form)]
    if reference is not None:
        y = frame.y(reference)
        parts.append(
            f'<line class="ref" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"></line>'
        )
    parts += [_draw_line(frame, line) for line in drawn]
    parts += [_draw_marks(frame, marks), "</svg>"]
    series = [
        _tooltip_series(line.name, line.colour, *bucket_means(line.steps, line.values), form)
        for line in drawn
    ]
    legend = [(line.name, line.colour, line.style) for line in drawn]
    return Chart(Markup("".join(parts)), _tooltip_data(frame, series, axis), legend)


def share_chart(
    amounts: Mapping[str, tuple[npt.NDArray[np.int64], FloatArray]],
    *,
    label: str,
    width: int = NARROW,
    marks: Sequence[Mark] = (),
) -> Chart | None:
    """Return stacked shares over steps, by name; None where all amounts are zero.

    Args:
        amounts: By name (steps, amounts); a step without a number counts as zero. Neighbouring steps are
            summed so that at most 120 columns are drawn.
        label: What it shows, for screen readers.
        width: WIDE or NARROW.
        marks: Vertical marks.
    """
    steps, table = _share_table(amounts)
    if not steps.size:
        return None
    last = float(steps[-1]) if steps[-1] > steps[0] else float(steps[0]) + 1
    frame = _Frame(width, _HEIGHTS[width], (float(steps[0]), last), (0.0, 1.0))
    parts = [_open(frame, label), _axes(frame, percent)]
    edges = np.vstack([np.zeros(len(steps)), np.cumsum(table, axis=0)])
    xs = [*steps.tolist()] if len(steps) > 1 else [float(steps[0]), last]
    repeat = 1 if len(steps) > 1 else 2
    for index in range(len(table)):
        low, high = (np.repeat(edges[index + side], repeat) for side in (0, 1))
        points = [(x, y) for x, y in zip(xs, high, strict=True)]
        points += [(x, y) for x, y in zip(reversed(xs), low[::-1], strict=True)]
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
        parts.append(f'<polygon class="area f{index % 8}" points="{path}"></polygon>')
    parts += [_draw_marks(frame, marks), "</svg>"]
    series = [
        _tooltip_series(name, index % 8, steps, table[index], percent) for index, name in enumerate(amounts)
    ]
    legend = [(name, index % 8, "area") for index, name in enumerate(amounts)]
    return Chart(Markup("".join(parts)), _tooltip_data(frame, series, "step"), legend)


def bucket_means(steps: npt.NDArray[np.int64], values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return at most MAX_POINTS (steps, values): means over equal runs, without what is not finite."""
    keep = np.isfinite(values)
    parts = min(MAX_POINTS, int(keep.sum()))
    if not parts:
        return np.empty(0), np.empty(0)
    return (
        np.array([part.mean() for part in np.array_split(steps[keep].astype(np.float64), parts)]),
        np.array([part.mean() for part in np.array_split(values[keep], parts)]),
    )


def moving_mean(values: FloatArray, *, window: int) -> FloatArray:
    """Return centred means over ``window`` values; gaps stay gaps.

    Windows shrink towards both ends, so a steep start is not flattened: the first and last values are kept.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    half = np.minimum(window // 2, np.minimum(index, index[::-1]))
    low, high = index - half, index + half + 1
    return np.where(finite, (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1), np.nan)


def nice_ticks(low: float, high: float, *, number: int = 5) -> list[float]:
    """Return round numbers within [low, high], about ``number`` of them."""
    raw = (high - low) / max(number, 1)
    if not (math.isfinite(raw) and raw > 0):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def percent(value: float) -> str:
    """Return a fraction as a percentage."""
    return f"{100 * value:.1f}%" if 0 < abs(value) < 0.1 else f"{100 * value:.0f}%"


def compact(value: float) -> str:
    """Return a number in at most five characters or so: 1.23, 45.6k, 7.8M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}"
    if value and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2g}".partition("e")[::2] if "e" in f"{value:.2g}" else (value, "")
        return f"{mantissa}e{int(exponent)}" if exponent else f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _share_table(
    amounts: Mapping[str, tuple[npt.NDArray[np.int64], FloatArray]],
) -> tuple[FloatArray, FloatArray]:
    """Return (steps [columns], shares [names, columns]) over columns with any amount."""
    known = [steps for steps, _ in amounts.values() if steps.size]
    if not known:
        return np.empty(0), np.empty((0, 0))
    steps = np.unique(np.concatenate(known))
    dense = np.zeros((len(amounts), len(steps)))
    for row, (own_steps, own_amounts) in enumerate(amounts.values()):
        dense[row, np.searchsorted(steps, own_steps)] = np.nan_to_num(own_amounts, posinf=0, neginf=0)
    groups = np.array_split(np.arange(len(steps)), min(120, len(steps)))
    summed = np.stack([dense[:, group].sum(axis=1) for group in groups], axis=1)
    middle = np.array([steps[group].mean() for group in groups])
    middle[0], middle[-1] = steps[0], steps[-1] if len(groups) > 1 else steps[0]
    total = summed.sum(axis=0)
    return middle[total > 0], summed[:, total > 0] / total[total > 0]


def _step_range(lines: Sequence[Line]) -> tuple[float, float]:
    low = min(float(line.steps[0]) for line in lines)
    high = max(float(line.steps[-1]) for line in lines)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _value_range(lines: Sequence[Line], *, from_zero: bool, also: float | None) -> tuple[float, float]:
    values = np.concatenate([line.values[np.isfinite(line.values)] for line in lines])
    if also is not None:
        values = np.append(values, also)
    low, high = float(values.min()), float(values.max())
    if from_zero:
        low = min(low, 0.0)
    if high <= low:
        half = abs(low) / 10 or 1.0
        return (low, high + half) if from_zero and low >= 0 else (low - half, high + half)
    margin = (high - low) * 0.06
    return (low if low == 0 and from_zero else low - margin), high + margin


def _open(frame: _Frame, label: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {frame.width} {frame.height}" role="img" '
        f'aria-label="{escape(label)}">'
    )


def _axes(frame: _Frame, form: Callable[[float], str]) -> str:
    parts: list[str] = []
    bottom, right = frame.height - _BOTTOM, frame.width - _RIGHT
    for value in nice_ticks(*frame.y_range, number=5 if frame.height > 250 else 4):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"></line>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(form(value))}</text>')
    for step in nice_ticks(*frame.x_range, number=10 if frame.width > 800 else 5):
        if step == round(step):
            x = frame.x(step)
            parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{step:,.0f}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"></line>')
    return "".join(parts)


def _draw_line(frame: _Frame, line: Line) -> str:
    css = f"line s{line.colour % 8}"
    if len(line.values) == 1:
        x, y = frame.x(float(line.steps[0])), frame.y(float(line.values[0]))
        return f'<circle class="dot f{line.colour % 8}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"></circle>'
    if line.style == "dashed":
        return _path(frame, f"{css} dashed", *_thin(line.steps, line.values))
    window = max(1, len(line.values) // 50)
    if line.style == "solid" or window == 1 or len(line.values) < _SMOOTH_FROM:
        return _path(frame, css, *_thin(line.steps, line.values))
    smooth = moving_mean(line.values, window=window)
    return _band(frame, line) + _path(frame, css, *_thin(line.steps, smooth))


def _thin(steps: npt.NDArray[np.int64], values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the values themselves where they are few, so that gaps stay gaps; else bucket means."""
    if len(values) <= MAX_POINTS:
        return steps.astype(np.float64), values
    return bucket_means(steps, values)


def _band(frame: _Frame, line: Line) -> str:
    """Draw the raw values: a faint line where they are few, else the band from least to largest."""
    if len(line.values) <= _RAW_POINTS:
        return _path(frame, f"raw s{line.colour % 8}", line.steps.astype(np.float64), line.values)
    keep = np.isfinite(line.values)
    steps = np.array_split(line.steps[keep], min(MAX_POINTS, int(keep.sum())))
    values = np.array_split(line.values[keep], len(steps))
    upper = [(part.mean(), value.max()) for part, value in zip(steps, values, strict=True)]
    lower = [(part.mean(), value.min()) for part, value in zip(steps, values, strict=True)]
    points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in [*upper, *reversed(lower)])
    return f'<polygon class="band f{line.colour % 8}" points="{points}"></polygon>'


def _path(frame: _Frame, css: str, steps: FloatArray, values: FloatArray) -> str:
    commands: list[str] = []
    pen_down = False
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        if not math.isfinite(value):
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{frame.x(step):.1f} {frame.y(value):.1f}")
        pen_down = True
    return f'<path class="{css}" d="{"".join(commands)}"></path>'


def _draw_marks(frame: _Frame, marks: Sequence[Mark]) -> str:
    """Draw marks from left to right; labels that would touch go to a second row, then away."""
    parts: list[str] = []
    free_from = [0.0, 0.0]
    for mark in sorted(marks, key=lambda item: item.step):
        low, high = frame.x_range
        x = frame.x(min(max(mark.step, low), high))
        kind = escape(mark.kind)
        top, bottom = frame.top - 4, frame.height - _BOTTOM
        parts.append(f'<line class="mark {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}">')
        parts.append(f"<title>{escape(mark.label)}</title></line>")
        length = 6.1 * len(mark.label)
        start = min(x + 5, frame.width - _RIGHT - length)
        row = next((index for index, edge in enumerate(free_from) if start >= edge), None)
        if frame.width == WIDE and row is not None:
            free_from[row] = start + length + 10
            y = frame.top - 24 + 15 * row
            parts.append(f'<text class="marktext {kind}" x="{start:.1f}" y="{y}">{escape(mark.label)}</text>')
    return "".join(parts)


def _tooltip_series(
    name: str, colour: int, steps: FloatArray, values: FloatArray, form: Callable[[float], str]
) -> dict[str, Any]:
    return {
        "name": name,
        "colour": colour % 8,
        "x": [round(step, 1) for step in steps.tolist()],
        "text": [form(value) for value in values.tolist()],
    }


def _tooltip_data(frame: _Frame, series: list[dict[str, Any]], axis: str) -> dict[str, Any]:
    return {
        "axis": axis,
        "width": frame.width,
        "left": _LEFT,
        "right": frame.width - _RIGHT,
        "top": frame.top,
        "bottom": frame.height - _BOTTOM,
        "range": list(frame.x_range),
        "series": series,
    }

"""Weight: how much a source or group weighs, as a run file gives it and as a function of step or tokens."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WrapValidator, model_validator
from pydantic_core.core_schema import ValidatorFunctionWrapHandler

Clock = Literal["steps", "tokens"]
Shape = Literal["constant", "linear", "cosine"]


class WeightTable(BaseModel):
    """A weight that changes over the run: points, and what lies between them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    points: tuple[tuple[int, float], ...] = Field(
        description="[at, weight] at rising steps or tokens; the first and last hold before and after."
    )
    over: Clock = Field("steps", description="Whether points are at steps, or at tokens drawn by all lanes.")
    curve: Shape = Field(
        "linear", description="From point to point: constant until the next, linear, or cosine (half a wave)."
    )

    @model_validator(mode="after")
    def _points_rise(self) -> WeightTable:
        _check_points(self.points, self.over)
        return self


def _check_weight(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    # A plain union would tell what is wrong with each of its forms; this tells it of the one that is meant.
    if isinstance(value, dict):
        return WeightTable.model_validate(value)
    curve_of(value)
    return handler(value)


Weight = Annotated[float | tuple[tuple[int, float], ...] | WeightTable, WrapValidator(_check_weight)]
"""A constant of at least 0; points ``[step, weight]``, linear between them; or a table."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A weight as a function of its clock; immutable.

    Args:
        clock: What it depends on.
        shape: What lies between two points.
        at: Places of the points, rising, at least one.
        values: Weights there.
    """

    clock: Clock
    shape: Shape
    at: tuple[int, ...]
    values: tuple[float, ...]

    def __call__(self, now: float) -> float:
        """Return the weight at this step or number of tokens."""
        after = bisect.bisect_right(self.at, now)
        if after == 0:
            return self.values[0]
        if after == len(self.at) or self.shape == "constant":
            return self.values[after - 1]
        start, end = self.at[after - 1 : after + 1]
        first, last = self.values[after - 1 : after + 1]
        progress = (now - start) / (end - start)
        if self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return first + (last - first) * progress


def curve_of(weight: Any) -> Curve:
    """Return the function that ``weight`` stands for.

    Raises:
        ValueError: A weight that is negative or not finite, or points that do not rise.
    """
    if isinstance(weight, WeightTable):
        points, clock, shape = weight.points, weight.over, weight.curve
    elif isinstance(weight, int | float):
        points, clock, shape = ((0, float(weight)),), "steps", "constant"
    else:
        points, clock, shape = _point_list(weight), "steps", "linear"
    _check_points(points, clock)
    return Curve(clock, shape, tuple(at for at, _ in points), tuple(value for _, value in points))


def _point_list(weight: Any) -> tuple[tuple[int, float], ...]:
    points = weight if isinstance(weight, list | tuple) else ()
    if not points or not all(_is_pair_of_numbers(point) for point in points):
        raise ValueError(
            f"weight {weight!r} is no number, no list of [step, weight] points, and no table with points"
        )
    for at, _ in points:
        if at != int(at):
            raise ValueError(f"weight has a point at step {at}, which is no step")
    return tuple((int(at), float(value)) for at, value in points)


def _is_pair_of_numbers(point: Any) -> bool:
    return (
        isinstance(point, list | tuple)
        and len(point) == 2
        and all(isinstance(value, int | float) for value in point)
        and math.isfinite(point[0])
    )


def _check_points(points: Sequence[tuple[int, float]], clock: Clock) -> None:
    if not points:
        raise ValueError("weight has no points")
    for at, value in points:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"weight {value} is not a finite number of at least 0")
        if at < 0:
            raise ValueError(f"weight has a point at {clock} {at}, which is below 0")
    if any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(points)):
        raise ValueError(f"{clock} {[at for at, _ in points]} of the weight do not rise")

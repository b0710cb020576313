"""Which source next: an exact weighted mixture with one number of state per source.

``credit`` of a source is what its share owes it, in tokens or samples. A draw of ``size`` adds ``share *
size`` to every credit and takes ``size`` from the drawn source; the next one drawn is the one with the
largest credit, ties by name. Shares sum to 1, so credits sum to 0.

**Bound.** With S sources and M the largest size drawn: ``-M <= credit <= M * H(S - 1)``, H(n) = 1 + 1/2 +
... + 1/n (one largest sample for two sources, 1.5 for three), even when shares change at every draw. Below:
the drawn source has the largest of credits that sum to 0, so at least 0, and loses at most M. Above, by
induction over draws: the mean credit of any k sources is at most ``M * (1/k + ... + 1/(S-1))``. True of k =
S, where the mean is 0. A draw inside the set cannot raise its sum. A draw outside had a credit at least
that of each of the k, so the mean of the k was at most the bound of those k + 1, and it grows by at most
M/k. (The argument is that of the cup game, Adler et al. 2003.)

A source that can no longer be drawn (weight zero, epochs used up) keeps no credit: all credits start again
from zero where it owed or was owed something, so the bound holds for the others from there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from omni_pipeline.core.errors import ConfigError

Weight = float | Sequence[Sequence[float]]
"""A constant weight, or points ``[step, weight]``: linear between them, constant before and after."""


class Mixture:
    """The weights of all sources over the steps; immutable.

    Args:
        weights: By source name; see ``Weight``.

    Raises:
        ConfigError: No source, a weight that is negative or not finite, steps that do not rise, or a step at
            which all weights are zero.
    """

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self.names = tuple(sorted(weights))
        self._points = tuple(_points(name, weights[name]) for name in self.names)
        self._cached: tuple[int, tuple[float, ...]] | None = None
        if not self.names:
            raise ConfigError("the mixture has no sources", fix="add a [[sources]] table")
        # Each weight is linear between points and never negative, so the sum is zero somewhere only if it
        # is at a point.
        for step in sorted({int(step) for points in self._points for step, _ in points}):
            if sum(self.weights(step)) <= 0:
                raise ConfigError(
                    f"all weights are zero at step {step}",
                    where=f"sources {', '.join(self.names)}",
                    fix="give at least one source a positive weight at every step",
                )

    def weights(self, step: int) -> tuple[float, ...]:
        """Return the weights at ``step``, in order of ``names``, as they are set (not normalised)."""
        if self._cached is None or self._cached[0] != step:
            self._cached = (step, tuple(_interpolate(points, step) for points in self._points))
        return self._cached[1]

    def shares(self, step: int, *, used_up: frozenset[int] = frozenset()) -> tuple[float, ...]:
        """Return the shares at ``step``, by ``names``: they sum to 1, or are all 0 where none can be drawn.

        Args:
            step: The step being filled.
            used_up: Indices of sources that have no samples left.
        """
        weights = [0.0 if i in used_up else w for i, w in enumerate(self.weights(step))]
        total = math.fsum(weights)
        return tuple(weight / total for weight in weights) if total > 0 else (0.0,) * len(weights)

    def drawn_from(self, step: int) -> frozenset[int]:
        """Return the indices of the sources with a positive weight at ``step`` or at any later one."""
        weights = self.weights(step)
        return frozenset(
            index
            for index, points in enumerate(self._points)
            if weights[index] > 0 or any(at > step and weight > 0 for at, weight in points)
        )


def next_source(credit: Sequence[float], shares: Sequence[float]) -> int | None:
    """Return the index of the source furthest behind its share, None if no source has a share."""
    best: int | None = None
    most = -math.inf
    for index, value in enumerate(credit):
        if value > most and shares[index] > 0.0:
            best, most = index, value
    return best


def charge(credit: list[float], shares: Sequence[float], *, source: int, size: int) -> None:
    """Book a draw of ``size`` from ``source`` into ``credit``."""
    for index, share in enumerate(shares):
        credit[index] += share * size
    credit[source] -= size


def settle(credit: list[float], shares: Sequence[float]) -> None:
    """Start all credits from zero if a source without a share has one; see the module's docstring."""
    for value, share in zip(credit, shares, strict=True):
        if value != 0.0 and share == 0.0:
            credit[:] = [0.0] * len(credit)
            return


def _points(name: str, weight: Weight) -> tuple[tuple[float, float], ...]:
    where = f"source {name!r}"
    fix = "give a number of at least 0, or a list of [step, weight] with rising steps"
    if isinstance(weight, int | float):
        points: tuple[tuple[float, float], ...] = ((0.0, float(weight)),)
    else:
        if not weight or any(len(point) != 2 for point in weight):
            raise ConfigError(f"weight {weight!r} is no list of [step, weight] points", where=where, fix=fix)
        points = tuple((float(point[0]), float(point[1])) for point in weight)
    for step, value in points:
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"weight {value} is not a finite number of at least 0", where=where, fix=fix)
        if not (step >= 0 and step.is_integer()):
            raise ConfigError(f"weight has a point at step {step}, which is no step", where=where, fix=fix)
    if any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(points)):
        raise ConfigError(
            f"steps {[int(step) for step, _ in points]} of the weight do not rise", where=where, fix=fix
        )
    return points


def _interpolate(points: Sequence[tuple[float, float]], step: int) -> float:
    if step <= points[0][0]:
        return points[0][1]
    for (start, first), (end, last) in itertools.pairwise(points):
        if step < end:
            return first + (last - first) * ((step - start) / (end - start))
    return points[-1][1]

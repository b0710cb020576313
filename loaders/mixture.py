"""Mixture: the share of every source at every moment of the run.

Weights are relative. Sources and groups that stand side by side (at the top, or in the same group) compete by
their weights, and what a group gets is shared out inside it in the same way; so the share of a source is the
product of its part at each level. What has nothing to give (weight 0, used up, or a group in which nothing
else is left) is left out where it stands, and its neighbours take its place.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from loaders.weight import Clock, Curve, Weight, curve_of
from omni_pipeline.core.errors import ConfigError

_CLOCKS: tuple[Clock, ...] = ("steps", "tokens")
# A source of a smaller share would not come once in the life of any run, and its credit would lose precision.
SMALLEST_SHARE = 1e-30
MOST_MOMENTS = 256


class Moment(NamedTuple):
    """A place in the run, on both clocks that a weight can follow.

    Args:
        step: The step being filled, from 0.
        tokens: Tokens that the lanes of the whole run have drawn by then; may be an estimate.
    """

    step: int
    tokens: int = 0


@dataclass(eq=False, slots=True)
class _Node:
    """A source (with its index) or a group (with its children)."""

    curve: Curve
    index: int | None = None
    children: list[_Node] = field(default_factory=list)

    def shares(self, share: float, at: Moment, used_up: frozenset[int]) -> Iterator[tuple[int, float]]:
        """Yield (source, its part of ``share``) of all sources below that can be drawn."""
        if self.index is not None:
            yield self.index, share
            return
        drawn = [(child, weight) for child in self.children if (weight := child.weight(at, used_up)) > 0]
        largest = max((weight for _, weight in drawn), default=0.0)
        total = sum(weight / largest for _, weight in drawn)
        for child, weight in drawn:
            yield from child.shares(share * (weight / largest / total), at, used_up)

    def weight(self, at: Moment, used_up: frozenset[int]) -> float:
        """Return its weight among its neighbours, 0 where it has nothing to give."""
        if self.index is None:
            gives = any(child.weight(at, used_up) > 0 for child in self.children)
        else:
            gives = self.index not in used_up
        return self.curve(_now(self.curve.clock, at)) if gives else 0.0


class Mixture:
    """The weights of all sources and groups over the run; immutable.

    Args:
        weights: By source name.
        group_of: Path of the group of a source, as ``web/clean``, by source name; others stand at the top.
        groups: Weight of each group, by path.

    Raises:
        ConfigError: No source, a wrong weight, groups that do not fit the sources, or a moment at which
            nothing has a weight.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        *,
        group_of: Mapping[str, str] | None = None,
        groups: Mapping[str, Weight] | None = None,
    ) -> None:
        if not weights:
            raise ConfigError("the mixture has no sources", fix="add a [[sources]] table")
        self.names = tuple(sorted(weights))
        groups, group_of = groups or {}, group_of or {}
        for problem in group_problems(group_of, groups):
            raise ConfigError(
                problem, fix="give every group of a source its weight in [groups], and no other"
            )
        nodes = {path: _Node(_curve(f"group {path!r}", weight)) for path, weight in groups.items()}
        self._top = _Node(curve_of(1.0))
        for path in sorted(nodes):
            nodes.get(path.rpartition("/")[0], self._top).children.append(nodes[path])
        # By source: its own weight and those of the groups that it is in.
        self._curves: list[list[Curve]] = []
        for index, name in enumerate(self.names):
            curve = _curve(f"source {name!r}", weights[name])
            paths = _prefixes(group_of[name]) if name in group_of else []
            nodes.get(paths[-1] if paths else "", self._top).children.append(_Node(curve, index=index))
            self._curves.append([curve, *(nodes[path].curve for path in paths)])
        self._is_over_tokens = any(curve.clock == "tokens" for curves in self._curves for curve in curves)
        self._points: dict[Clock, list[int]] = {
            clock: sorted(
                {0, *(at for curves in self._curves for c in curves if c.clock == clock for at in c.at)}
            )
            for clock in _CLOCKS
        }
        self._cached: tuple[tuple[Moment, frozenset[int]], tuple[float, ...]] | None = None
        self._check_never_empty()

    def shares(self, at: Moment, *, used_up: frozenset[int] = frozenset()) -> tuple[float, ...]:
        """Return the shares at a moment, by ``names``: they sum to 1, or are all 0 where none can be drawn.

        Args:
            at: When.
            used_up: Indices of sources that have no samples left.
        """
        key = (at if self._is_over_tokens else Moment(at.step), used_up)
        if self._cached is None or self._cached[0] != key:
            shares = [0.0] * len(self.names)
            for index, share in self._top.shares(1.0, at, used_up):
                shares[index] = share if share >= SMALLEST_SHARE else 0.0
            self._cached = (key, tuple(shares))
        return self._cached[1]

    def drawn_from(self, at: Moment) -> frozenset[int]:
        """Return the indices of the sources that have a share at this moment or can get one later."""
        return frozenset(
            index
            for index, curves in enumerate(self._curves)
            if all(
                _is_ever_positive([c for c in curves if c.clock == clock], _now(clock, at))
                for clock in _CLOCKS
            )
        )

    def wake(self, at: Moment, *, used_up: frozenset[int]) -> Moment:
        """Return the first moment from ``at`` on, at the same step, at which something can be drawn.

        Where nothing can be drawn no tokens come, so a weight that waits for tokens would wait for ever. If
        nothing ever can at this step, ``at`` is returned.
        """
        if any(self.shares(at, used_up=used_up)):
            return at
        ahead = [point for point in self._points["tokens"] if point > at.tokens]
        between = [(first + second) // 2 for first, second in itertools.pairwise((at.tokens, *ahead))]
        for tokens in sorted({*ahead, *between}):
            later = Moment(at.step, tokens)
            if any(self.shares(later, used_up=used_up)):
                return later
        return at

    def moments(self) -> list[Moment]:
        """Return the start and moments at which weights have points; of many, ``MOST_MOMENTS`` of them."""
        pairs = len(self._points["steps"]) * len(self._points["tokens"])
        every = itertools.product(self._points["steps"], self._points["tokens"])
        return [Moment(*pair) for pair in itertools.islice(every, 0, None, -(-pairs // MOST_MOMENTS))]

    def _check_never_empty(self) -> None:
        # Weights are never negative and are constant or curved between points, so all are zero somewhere only
        # if they are at a point; between the clocks any pair may come together.
        steps, tokens = self._points["steps"], self._points["tokens"]
        empty = np.ones((len(steps), len(tokens)), dtype=bool)
        for curves in self._curves:
            by_step, by_tokens = (
                [all(c(at) > 0 for c in curves if c.clock == clock) for at in self._points[clock]]
                for clock in _CLOCKS
            )
            empty &= ~np.logical_and.outer(by_step, by_tokens)
        if empty.any():
            step, token = (int(place) for place in np.argwhere(empty)[0])
            when = f"step {steps[step]}" + (f" and {tokens[token]} tokens" if self._is_over_tokens else "")
            raise ConfigError(
                f"all weights are zero at {when}",
                where=f"sources {', '.join(self.names)}",
                fix="give at least one source a positive weight at every moment",
            )


def group_problems(group_of: Mapping[str, str], groups: Collection[str]) -> Iterator[str]:
    """Yield what is wrong between the groups that sources name and those that have a weight."""
    used = {path: name for name in sorted(group_of) for path in _prefixes(group_of[name])}
    for path, name in used.items():
        if not all(path.split("/")):
            yield f"group {group_of[name]!r} of source {name!r} has a part without a name"
        elif path not in groups:
            yield f"group {path!r} of source {name!r} has no weight{_nearest(path, groups)}"
    for path in groups:
        if path not in used:
            yield f"no source is in group {path!r}{_nearest(path, used)}"


def _now(clock: Clock, at: Moment) -> int:
    return at.step if clock == "steps" else at.tokens


def _is_ever_positive(curves: Collection[Curve], now: int) -> bool:
    """Whether at some time from ``now`` on all curves are above 0 at once."""
    ahead = sorted({now, *(point for curve in curves for point in curve.at if point > now)})
    between = [(first + second) // 2 for first, second in itertools.pairwise(ahead)]
    return any(all(curve(time) > 0 for curve in curves) for time in (*ahead, *between))


def _prefixes(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[: end + 1]) for end in range(len(parts))]


def _nearest(path: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(path, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _curve(where: str, weight: Weight) -> Curve:
    try:
        return curve_of(weight)
    except ValueError as error:
        raise ConfigError(
            str(error),
            where=where,
            fix="give a number of at least 0, a list of [step, weight], or a table {points, over, curve}",
        ) from error

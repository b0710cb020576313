"""Single lanes followed with numbers only, to find the step at which a position of a source is packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loaders.order import Order
from omni_pipeline.app.follow import KnownStates, Progress, Start, follow
from omni_pipeline.core.errors import StateMismatchError


@dataclass(frozen=True, slots=True)
class Packed:
    """Where a position was packed: step, and running number of the pack in its lane."""

    step: int
    number: int


class LaneWalk:
    """One lane, followed from a known state; remembers where the wanted rows were packed.

    Args:
        lane: Number of the lane.
        order: The order of this lane alone, from ``start`` on.
        start: Where it begins.
        wanted: (source, ordinal) to remember.
    """

    def __init__(self, lane: int, order: Order, start: Start, wanted: Mapping[str, frozenset[int]]) -> None:
        self._lane = lane
        self._order = order
        self._start = start
        self._wanted = wanted
        self._packed: dict[tuple[str, int], Packed] = {}
        self.step = start.step

    @property
    def exhausted(self) -> bool:
        """Whether the lane has nothing left."""
        return self._order.exhausted

    def covers(self, source: str, position: int) -> bool:
        """Return whether ``position`` was still ahead where this walk began."""
        return is_ahead(self._start, self._lane, source, position)

    def walk_to(self, step: int, progress: Progress) -> None:
        """Follow up to, not including, ``step``."""
        for at, packs in follow(self._order, range(self.step, step), progress=progress):
            for pack in packs:
                for entry in pack.entries:
                    source = self._order.source_names[entry.source]
                    if entry.ordinal in self._wanted.get(source, ()):
                        self._packed[source, entry.position] = Packed(at, pack.number)
            self.step = at + 1

    def packed(self, source: str, position: int) -> Packed | None:
        """Return where ``position`` was packed so far."""
        return self._packed.get((source, position))

    def num_drawn(self, source: str) -> int:
        """Return the positions of ``source`` that were drawn so far."""
        state: dict[str, Any] = self._order.state_dict()[str(self._lane)]
        return int(state["sources"][source]["position"])


class LaneWalks:
    """Walks of any lane of a run, each followed once unless something earlier is asked for.

    Args:
        states: Known states of the run.
        wanted: Ordinals to remember, by source.
        progress: Told how far each walk is.
    """

    def __init__(self, states: KnownStates, wanted: Mapping[str, frozenset[int]], progress: Progress) -> None:
        self._states = states
        self._wanted = wanted
        self._progress = progress
        self._walks: dict[int, LaneWalk] = {}

    @property
    def num_lanes(self) -> int:
        """Lanes followed so far."""
        return len(self._walks)

    def to(self, lane: int, step: int, *, source: str, position: int) -> LaneWalk:
        """Return a walk of ``lane`` that has come to ``step`` and has met ``position`` if it is before."""
        walk = self._walks.get(lane)
        if walk is None or not walk.covers(source, position):
            walk = self._walks[lane] = self._begin(lane, step, source, position)
        walk.walk_to(step, self._progress)
        return walk

    def _begin(self, lane: int, step: int, source: str, position: int) -> LaneWalk:
        for start in self._states.before(step):
            if not is_ahead(start, lane, source, position):
                continue
            try:
                return LaneWalk(lane, self._states.order_at(start, [lane]), start, self._wanted)
            except StateMismatchError:
                continue
        raise AssertionError("everything is ahead before step 0")


def is_ahead(start: Start, lane: int, source: str, position: int) -> bool:
    """Return whether a lane has not packed ``position`` of ``source`` before ``start``."""
    if start.lanes is None:
        return True
    state = start.lanes.get(str(lane))
    if not isinstance(state, Mapping):
        return False
    saved = state["sources"].get(source)
    return saved is None or position >= saved["position"] or [source, position] in state["buffer"]

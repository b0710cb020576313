"""One lane's packs: its place in every source, its mixture, its look-ahead buffer, and their state.

A lane is a deterministic machine: the same settings and the same state give the same next pack, whoever
runs it. What it keeps is at most ``look_ahead`` buffered samples, two numbers per source and two of its own.
It works on numbers; ``Order`` makes samples of the entries that are handed out.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loaders.bucketing import BucketBuffer, Buckets
from loaders.draw import Draw
from loaders.lane_cursor import LaneCursor, LeftOut, SampleSource
from loaders.lanes import LaneOrder
from loaders.mixture import Mixture, Moment
from loaders.order_config import OrderConfig
from loaders.packing import Entry, PackBuffer
from omni_pipeline.core.errors import StateMismatchError

logger = logging.getLogger(__name__)

# Multiples of it modulo 1 are spread evenly, however many are taken (Weyl; the fraction of the golden ratio).
GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class UsedUp:
    """A lane has drawn all epochs of a source; its share goes to the others.

    Args:
        source: Name of the source.
        lane: The lane.
        step: Step that was being filled.
        shares: Shares of all sources in this lane from here on, by name.
    """

    source: str
    lane: int
    step: int
    shares: dict[str, float]


class LanePacker:
    """One lane: where it stands in every source, its credits, its buffer.

    Args:
        lane: Its number.
        config: Settings of the run.
        mixture: The weights; shared by all lanes.
        sources: In the order of ``mixture.names``.
        orders: The sources' orders, likewise.
        left_out: Takes the rows that are passed by.
        used_up: Takes the sources that end in this lane.
        buckets: Fill packs by these; None packs by best fit.
    """

    def __init__(
        self,
        lane: int,
        config: OrderConfig,
        *,
        mixture: Mixture,
        sources: Sequence[SampleSource],
        orders: Sequence[LaneOrder],
        left_out: LeftOut,
        used_up: list[UsedUp],
        buckets: Buckets | None,
    ) -> None:
        self._lane = lane
        self._config = config
        self._by_tokens = config.unit == "tokens"
        self._mixture = mixture
        self._all_used_up = used_up
        self._buckets = buckets
        self._cursors = [
            LaneCursor(
                lane,
                index=index,
                source=source,
                order=order,
                budgets=config.budgets,
                oversize=config.oversize,
                left_out=left_out,
            )
            for index, (source, order) in enumerate(zip(sources, orders, strict=True))
        ]
        self._number = 0
        self._tokens = 0
        self._moment = Moment(0)
        self._rule = Draw([0.0] * len(orders))
        # The next sample of each source that has a share, and its size in the unit of the mixture.
        self._heads: list[Entry | None] = [None] * len(orders)
        self._next_sizes = [1] * len(orders)
        # Whether the source has its phase in this lane, see ``phase``.
        self._begun = [False] * len(orders)
        self._shares: tuple[float, ...] = (0.0,) * len(orders)
        self._buffer = self._new_buffer()

    @property
    def exhausted(self) -> bool:
        """Whether the buffer is empty and no source that is drawn at this step or later has samples left."""
        if len(self._buffer):
            return False
        return self._mixture.drawn_from(self._moment) <= self._used_up()

    def begin_step(self, step: int) -> None:
        """Take the shares of ``step``; to be called before its first pack."""
        self._moment = self._at(step)
        self._set_shares()

    def next_pack(self) -> tuple[int, list[Entry]]:
        """Return the number of the next pack, and its entries in sequence order."""
        entries = self._buffer.next_pack(self._draw)
        self._number += 1
        return self._number - 1, entries

    def remaining(self) -> dict[str, int]:
        """Return the rows not packed yet, buffered or not drawn, by source; endless ones are absent."""
        rows = {
            name: cursor.limit - cursor.position
            for name, cursor in zip(self._mixture.names, self._cursors, strict=True)
            if cursor.limit is not None
        }
        for entry in self._buffer:
            name = self._mixture.names[entry.source]
            if name in rows:
                rows[name] += 1
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return this lane's part of ``Order.state_dict``."""
        names = self._mixture.names
        return {
            "number": self._number,
            "tokens": self._tokens,
            "sources": {
                name: {"position": cursor.position, "credit": credit, "begun": begun}
                for name, cursor, credit, begun in zip(
                    names, self._cursors, self._rule.credit, self._begun, strict=True
                )
            },
            "buffer": [[names[entry.source], entry.position] for entry in self._buffer],
        }

    def check(self, state: Any) -> None:
        """Raise ``StateMismatchError`` unless ``state`` can be loaded."""
        try:
            used = {str(name): int(saved["position"]) for name, saved in state["sources"].items()}
            buffered: dict[str, list[int]] = {name: [] for name in used}
            for name, position in state["buffer"]:
                buffered[name].append(int(position))
            fits = (
                int(state["number"]) >= 0
                and int(state["tokens"]) >= 0
                and all(
                    # Oldest first is rising, since a lane draws a source in the order of its positions.
                    all(low < high for low, high in itertools.pairwise((-1, *positions, used[name])))
                    for name, positions in buffered.items()
                )
            )
            _ = [float(saved["credit"]) for saved in state["sources"].values()]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateMismatchError(
                f"state of lane {self._lane} is malformed: {error!r}", fix="resume from another checkpoint"
            ) from error
        if not fits:
            raise StateMismatchError(
                f"state of lane {self._lane} buffers samples that it says were not drawn, or not in order",
                fix="resume from another checkpoint",
            )
        for name, cursor in zip(self._mixture.names, self._cursors, strict=True):
            if cursor.limit is not None and used.get(name, 0) > cursor.limit:
                raise StateMismatchError(
                    f"lane {self._lane} had {used[name]} rows of source {name!r}, here it has {cursor.limit}",
                    fix="resume with the shards and epochs it was saved with",
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that ``check`` let pass; reads the buffered samples' sizes again."""
        names = self._mixture.names
        saved = state["sources"]
        gone = sorted(set(saved) - set(names))
        self._number, self._tokens = int(state["number"]), int(state["tokens"])
        # The step that was filled last: whether the lane is exhausted is asked before the next one begins.
        self._moment = self._at(max(0, self._number // self._config.packs_per_lane - 1))
        for name, cursor in zip(names, self._cursors, strict=True):
            cursor.seek(int(saved[name]["position"]) if name in saved else 0)
        credit = [float(saved[name]["credit"]) if name in saved else 0.0 for name in names]
        # States of before phases were kept go on without them.
        self._begun = [name in saved and bool(saved[name].get("begun", True)) for name in names]
        if any(saved[name]["credit"] != 0 for name in gone):
            credit = [0.0] * len(names)
            self._begun = [False] * len(names)
        self._rule = Draw(credit)
        index_of = {name: index for index, name in enumerate(names)}
        kept = [(index_of[name], int(position)) for name, position in state["buffer"] if name in index_of]
        if gone:
            logger.debug(
                "lane %s: sources %s are no longer in the run; left out with %s buffered samples",
                self._lane,
                ", ".join(gone),
                len(state["buffer"]) - len(kept),
            )
        self._buffer = self._new_buffer()
        for entry in self._entries(kept):
            self._buffer.add(entry)

    def _entries(self, places: Sequence[tuple[int, int]]) -> Iterator[Entry]:
        """Yield the samples at (source, position), in order, a source's looked up at once."""
        positions: dict[int, list[int]] = {}
        for source, position in places:
            positions.setdefault(source, []).append(position)
        found = {source: iter(self._cursors[source].entries(wanted)) for source, wanted in positions.items()}
        for source, _ in places:
            entry = next(found[source])
            if entry is not None:
                yield entry

    def _new_buffer(self) -> PackBuffer | BucketBuffer:
        budgets, look_ahead = self._config.budgets, self._config.look_ahead
        if self._buckets is None:
            return PackBuffer(budgets, look_ahead=look_ahead)
        return BucketBuffer(self._buckets, budgets, look_ahead=look_ahead)

    def _at(self, step: int) -> Moment:
        return Moment(step, self._tokens * self._config.lanes)

    def _draw(self) -> Entry | None:
        """Draw the next sample; None when no source has one."""
        source = self._rule.next(self._next_sizes)
        if source is None:
            return None
        entry = self._heads[source]
        assert entry is not None, f"source {source} has a share and no sample"
        self._rule.charge(source, self._next_sizes[source])
        self._tokens += entry.tokens
        following = self._heads[source] = self._cursors[source].advance()
        if following is None:
            self._set_shares()
            self._announce(source)
        elif self._by_tokens:
            self._next_sizes[source] = following.tokens
        return entry

    def _set_shares(self) -> None:
        """Share out the mixture over the sources that have a sample, and look up the next one of each."""
        while True:
            used_up = self._used_up()
            shares = self._mixture.shares(self._mixture.wake(self._moment, used_up=used_up), used_up=used_up)
            if all(self._look_up(source) for source, share in enumerate(shares) if share > 0):
                break
        self._shares = shares
        if self._rule.set_shares(shares):
            self._begun = [False] * len(shares)
        for source, share in enumerate(shares):
            if share > 0 and not self._begun[source]:
                part = phase(source, num_sources=len(shares), lane=self._lane)
                self._rule.charge(source, part * self._next_sizes[source])
                self._begun[source] = True

    def _look_up(self, source: int) -> bool:
        head = self._heads[source] = self._cursors[source].head()
        if head is not None and self._by_tokens:
            self._next_sizes[source] = head.tokens
        return head is not None

    def _used_up(self) -> frozenset[int]:
        return frozenset(index for index, cursor in enumerate(self._cursors) if cursor.used_up)

    def _announce(self, source: int) -> None:
        names = self._mixture.names
        shares = dict(zip(names, self._shares, strict=True))
        self._all_used_up.append(UsedUp(names[source], self._lane, self._moment.step, shares))


def phase(source: int, *, num_sources: int, lane: int) -> float:
    """Return the part of a sample, 0 to 1, that a lane counts as drawn when a source begins.

    Lanes that all begin with nothing owed would draw a rare source at the same draw, so that it came in
    bursts: in all lanes in one step, then in none for many. Spread over lanes, the first draws, and so all
    later ones, are spread over the time in which the source's share makes one sample, and over all lanes a
    source comes as often as its share says from the first step on. A lane's sources are spread likewise.
    """
    return (lane * GOLDEN + source / num_sources) % 1.0
